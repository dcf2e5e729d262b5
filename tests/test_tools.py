"""tests/ 里的几个工具：diff.py 怎么说，按 Ctrl-C、管道断了、磁盘满了时怎么结束。"""
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import diff
from conftest import COPY, ROOT

TRANSCRIPT = (ROOT / "tests" / "transcript.txt").read_text(encoding="utf-8")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="要用 POSIX 的信号和文件描述符")


@pytest.fixture
def tools(lesson):
    """一份课程，连同 tests/ 里的工具。"""
    (lesson.folder / "tests").mkdir()
    for name in ("diff.py", "claims.py", "bench.py", "transcript.txt"):
        lesson.write(f"tests/{name}", (ROOT / "tests" / name).read_bytes())
    lesson.write("data/prepare.py", (COPY / "data" / "prepare.py").read_bytes())
    return lesson


def print_transcript(tools):
    """不等 generate.py 写诗：换成一个照样打印记录的。"""
    record = str(tools.folder / "tests" / "transcript.txt")
    tools.write("generate.py", f"import sys\nsys.stdout.buffer.write(open({record!r}, 'rb').read())")


def test_masking_hides_only_the_times():
    line = "  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍"
    assert diff.mask(line) == "  写  32 个字：不用缓存 … 毫秒，用缓存 … 毫秒，快了 … 倍"
    assert diff.diff("春风。\n" + line, "春风。\n" + line.replace("1.8", "12.5").replace("23", "7"), "a") == []
    assert diff.diff("春风。\n", "春雨。\n", "a") != []


def test_the_same_text_and_a_line_that_differs(tools, tmp_path):
    print_transcript(tools)
    code, out, error = tools.run_here("tests/diff.py")
    assert (code, error) == (0, "") and out == "和 transcript.txt 一样（计时的数字不算）\n"
    mine = tmp_path / "我的记录.txt"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "gbk"):  # PowerShell 7 的 > 写 UTF-8，5 的写 UTF-16
        mine.write_bytes(TRANSCRIPT.replace("温度 0.3：", "温度 0.4：").replace("\n", "\r\n").encode(encoding, "replace"))
        code, out, error = tools.run_here("tests/diff.py", mine)
        lines = out.splitlines()
        assert code == 1 and "-  温度 0.4：" in lines and "+  温度 0.3：" in lines and error == ""
        assert encoding == "gbk" or sum(line[0] in "+-" for line in lines) == 4  # 只有这一行不同，时间不算


def test_a_record_that_will_not_do(tools, tmp_path):
    """没有这个文件；是文件夹；PowerShell 5 的 > 把 UTF-8 当成 GBK，再存成 UTF-16。"""
    print_transcript(tools)
    spoilt, other = tmp_path / "坏.txt", tmp_path / "别的.txt"
    spoilt.write_bytes(TRANSCRIPT.encode("utf-8").decode("gbk", "replace").encode("utf-16"))
    other.write_text("春风", encoding="utf-8")
    for record, words in ((tmp_path / "没有.txt", "找不到记录"), (tmp_path, "读不出来"), (other, "编码坏了"),
                          (spoilt, 'cmd /c "python generate.py > 我的记录.txt"')):
        code, out, error = tools.run_here("tests/diff.py", record)
        assert (code, out, len(error.splitlines())) == (1, "", 1) and record.name in error and words in error, error


def test_when_generate_py_fails_there_is_only_its_own_word(tools):
    for encoding in ("utf-8", "gbk"):
        tools.write("generate.py", f"import sys\nprint('== 1.')\nsys.stderr.buffer.write('常量有误'.encode('{encoding}'))\nsys.exit(1)")
        assert tools.run_here("tests/diff.py") == (1, "", "常量有误")


@POSIX
@pytest.mark.parametrize("name", ["diff", "claims", "bench"])
def test_endings(tools, name):
    """管道断了、磁盘满了、按 Ctrl-C：都只说一句话。"""
    if name == "diff":
        print_transcript(tools)
    command = f'"{sys.executable}" "{tools.folder / "tests" / name}.py"'
    endings = {f"set -o pipefail; {command} | true": "先结束了"}
    if Path("/dev/full").exists():  # macOS 没有
        endings[f"{command} > /dev/full"] = "磁盘满了"
    for shell, words in endings.items():
        done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=120)
        error = done.stderr.decode("utf-8").splitlines()
        assert done.returncode == 1 and words in error[-1] and "Traceback" not in "".join(error), error
    if name == "diff":  # 它要等 generate.py 打印完，自己才打印
        tools.write("generate.py", "import time\ntime.sleep(60)")
        tools.replace("tests/diff.py", "    done = ", "    print(flush=True)\n    done = ")
    process = tools.start(f"tests/{name}.py")
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1].decode("utf-8")
    assert process.returncode == 1 and error.splitlines()[-1] == "已停止。" and "Traceback" not in error, error


# 脚本真正开始做事的一行
WORK = [("generate.py", "    probabilities()\n"), ("train.py", "        content = train()\n"),
        ("data/prepare.py", "    if len(sys.argv) != 2:\n"), ("tests/diff.py", "    path = Path(")]


@pytest.mark.parametrize("name, line", WORK)
def test_on_windows_a_closed_pipe_is_einval(tools, name, line):
    source = tools.read(name)
    indent = line[:len(line) - len(line.lstrip())]
    for number, said in (("EINVAL", True), ("EIO", False)):  # 别的系统错误，照旧显示调用栈
        tools.write(name, source.replace(line, f"{indent}raise OSError(errno.{number}, 'x')\n{line}", 1))
        code, _, error = tools.run_here(name)
        assert code == 1 and ("先结束了" in error) == said and ("Traceback" not in error) == said, error


def test_bench_hands_on_what_train_py_said(tools):
    tools.edit("tests/bench.py", STEPS=1)
    tools.edit("train.py", LEARNING_RATE=-1)
    code, _, error = tools.run_here("tests/bench.py")
    assert code == 1 and "LEARNING_RATE 应为 0 到 1 的数，不含 0，得到 -1" in error and "Traceback" not in error
