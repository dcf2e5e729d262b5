"""换一台机器、换一种终端，打印的诗还是一样。"""
import os
import shutil
import subprocess
import sys

import pytest

import diff
from conftest import ROOT


@pytest.mark.parametrize("environ", [
    {"OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONIOENCODING": "gbk"},
    {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "default", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}])
def test_same_text_elsewhere(edited, environ, tmp_path, monkeypatch):
    source = edited("generate.py", REPEATS=1).parent
    folder = tmp_path / "另一个 文件夹"
    folder.mkdir()
    for name in ("generate.py", "gpt.py", "tokenizer.py", "ckpt.pt"):  # 没有 poems.txt 也能运行
        shutil.move(source / name, folder)
    monkeypatch.chdir(tmp_path)
    code, out, error = diff.run(folder / "generate.py", **environ)
    assert (code, error) == (0, "") and diff.diff(diff.read(diff.TRANSCRIPT), out, "transcript.txt") == []


@pytest.mark.skipif(sys.platform == "win32", reason="要用 POSIX 的管道")
def test_output_closed_early():
    process = subprocess.Popen([sys.executable, ROOT / "generate.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1 and first.startswith("== 1.".encode())


@pytest.mark.skipif(sys.platform == "win32", reason="要用伪终端")
def test_a_terminal_sees_one_line_that_updates_in_place(edited):
    import pty
    script = edited("train.py", MAX_STEPS=6, EVAL_EVERY=3, BATCH_SIZE=2, WARMUP_STEPS=1)
    edited("gpt.py", n_layer=1, n_embd=16, block_size=16)
    poems = script.parent / "data" / "poems.txt"
    poems.write_text("".join(poems.read_text(encoding="utf-8").splitlines(keepends=True)[:200]), encoding="utf-8", newline="\n")
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, script], stdout=slave, stderr=slave)
    os.close(slave)
    out = b""
    while True:
        try:
            out += os.read(master, 4096) or b""
        except OSError:  # 程序结束，终端关了
            break
    text = out.decode("utf-8").replace("\r\n", "\n")
    assert process.wait() == 0 and text.count("\r第 ") == 6 and "\r第 1/6 步" in text and "\n第 1/6 步" not in text


def test_diff_on_the_command_line(tmp_path):
    mine = tmp_path / "我的记录.txt"
    text = diff.read(diff.TRANSCRIPT)
    mine.write_text(text.replace("温度 0.3：", "温度 0.4："), encoding="utf-16")  # PowerShell 的 > 写的是 UTF-16
    command = [sys.executable, ROOT / "tests" / "diff.py"]
    done = subprocess.run([*command, mine], capture_output=True)
    lines = done.stdout.decode("utf-8").splitlines()
    assert done.returncode == 1 and "-  温度 0.4：" in lines and "+  温度 0.3：" in lines
    assert sum(line[0] in "+-" for line in lines) == 4  # 只有这一行不同，时间不算
    missing = subprocess.run([*command, tmp_path / "没有.txt"], capture_output=True)
    assert missing.returncode == 1 and len(missing.stderr.decode("utf-8").splitlines()) == 1


def test_masking_hides_only_the_times():
    line = "  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍"
    assert diff.mask(line) == "  写  32 个字：不用缓存 … 毫秒，用缓存 … 毫秒，快了 … 倍"
    assert diff.diff("春风。\n" + line, "春风。\n" + line.replace("1.8", "12.5").replace("23", "7"), "a") == []
    assert diff.diff("春风。\n", "春雨。\n", "a") != []
