"""运行 generate.py，把它打印的和记录逐行比较，计时的数字不算。

    python tests/diff.py             和 tests/transcript.txt（课程自带的 ckpt.pt 打印的）比较
    python tests/diff.py 我的记录.txt   和别的记录比较

一样时退出码是 0。不一样时打印 unified diff，退出码是 1：减号开头的行是记录里的，加号开头的是现在打印的。
generate.py 自己出了错，就只打印它的错误，不比较。
"""
import difflib
import errno
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATE = HERE.parent / "generate.py"
TRANSCRIPT = HERE / "transcript.txt"
FIRST = "== 1. 读完一段文字"  # 每份记录都有的第一行


def decode(raw):
    """bytes -> 文字：UTF-8；PowerShell 的 > 写出来的 UTF-16；都不是，就当作中文 Windows 的 GBK。"""
    try:
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("gb18030", errors="replace")
    return text.replace("\r\n", "\n")


def mask(text):
    """把计时的数字换成 …：每台机器、每次运行都不一样。"""
    return re.sub(r" +\d+ 毫秒", " … 毫秒", re.sub(r"快了 [\d.]+ 倍", "快了 … 倍", text))


def diff(expected, got, name):
    """不比较时间的 unified diff，list[str]；没有差别时是空的。"""
    expected, got = mask(expected).splitlines(), mask(got).splitlines()
    return list(difflib.unified_diff(expected, got, name, "python generate.py", lineterm=""))


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRANSCRIPT
    try:
        expected = decode(path.read_bytes())
    except OSError as e:
        sys.exit(f"找不到记录 {path}，请看看名字写对了没有" if isinstance(e, FileNotFoundError)
                 else f"记录 {path} 读不出来（{type(e).__name__}），请给出一个文本文件")
    if FIRST not in expected:
        sys.exit(f"记录 {path} 里没有「{FIRST}」：不是 generate.py 打印的，或者存的时候编码坏了"
                 "（PowerShell 5 的 > 就会）。请重新存一份："
                 'cmd /c "python generate.py > 我的记录.txt"，'
                 "别的系统用 python generate.py > 我的记录.txt")
    done = subprocess.run([sys.executable, str(GENERATE)], capture_output=True)
    print(decode(done.stderr), end="", file=sys.stderr)
    if done.returncode:
        sys.exit(1)
    lines = diff(expected, decode(done.stdout), str(path))
    print("\n".join(lines) if lines else f"和 {path.name} 一样（计时的数字不算）")
    print(end="", flush=True)
    sys.exit(1 if lines else 0)


def run(main):
    """运行 main：输出用 UTF-8；按 Ctrl-C、管道断了、磁盘满了，都只说一句话。别的工具也用它。"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        main()
        print(end="", flush=True)
    except KeyboardInterrupt:
        sys.exit("\n已停止。")
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE, errno.EINVAL):  # Windows 上管道断了是 EINVAL
            raise
        sys.stdout = None  # 不再打印
        sys.exit("没有打印完：磁盘满了，或者接收输出的程序先结束了")


if __name__ == "__main__":
    run(main)
