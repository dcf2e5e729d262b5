"""运行 generate.py，把它打印的和记录逐行比较，计时的数字不算。

    python tests/diff.py             和 tests/transcript.txt（课程自带的 ckpt.pt 打印的）比较
    python tests/diff.py 我的记录.txt   和别的记录比较

一样时退出码是 0；不一样时打印 unified diff，退出码是 1：减号开头的行是记录里的，加号开头的行是现在打印的。
"""
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATE = HERE.parent / "generate.py"
TRANSCRIPT = HERE / "transcript.txt"


def run(script=GENERATE, **environ):
    """运行脚本，返回 (退出码, 标准输出, 标准错误)。environ：另加的环境变量。"""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, env={**os.environ, **environ})
    return done.returncode, *(stream.decode("utf-8").replace("\r\n", "\n") for stream in (done.stdout, done.stderr))


def mask(text):
    """遮住计时的数字：每台机器、每次运行都不一样。"""
    return re.sub(r" +\d+ 毫秒", " … 毫秒", re.sub(r"快了 [\d.]+ 倍", "快了 … 倍", text))


def read(path):
    """读一份记录：UTF-8，或者 PowerShell 的 > 写出来的 UTF-16。"""
    raw = Path(path).read_bytes()
    utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    return raw.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n")


def diff(expected, got, name):
    """遮住时间以后的 unified diff，list[str]；没有差别时是空的。"""
    expected, got = mask(expected).splitlines(), mask(got).splitlines()
    return list(difflib.unified_diff(expected, got, name, "python generate.py", lineterm=""))


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else TRANSCRIPT
    try:
        expected = read(path)
    except (OSError, UnicodeDecodeError) as e:
        sys.exit(f"记录 {path} 读不出来（{e}），请给出一份 UTF-8 的文本文件")
    code, got, error = run()
    sys.stderr.write(error)
    lines = diff(expected, got, str(path))
    print("\n".join(lines) if lines else f"和 {Path(path).name} 一样（计时的数字不算）")
    sys.exit(1 if lines or code else 0)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    main()
