"""测试共用的东西：让测试找得到脚本，备好一个小模型和脚本的副本。"""
import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from gpt import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)  # 小模型用一个线程最快，也不和别的进程争
TINY = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16}
QUICK = {"MAX_STEPS": 12, "EVAL_EVERY": 4, "BATCH_SIZE": 4, "WARMUP_STEPS": 3, "DECAY_STEPS": 6}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: 一分钟左右的测试，平时不跑；.ci/run 用 -m slow 另外跑")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture
def tiny():
    """随机初始化的小模型：窗口 16，词表 50。分数放大一些，概率才不至于几乎相等。"""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=16, dropout=0.2))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(10)
    return model


class Lesson:
    """临时文件夹里的一份课程：改哪个文件就复制哪个，其余是链接。"""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").mkdir()
        for name in ("generate.py", "gpt.py", "train.py", "tokenizer.py", "ckpt.pt", "data/poems.txt"):
            try:
                os.link(ROOT / name, folder / name)
            except OSError:  # 不在同一个磁盘上
                shutil.copy(ROOT / name, folder / name)

    def write(self, name, content):
        """换掉一个文件，不碰它链接着的原件。content：str 或 bytes。"""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def replace(self, name, old, new):
        """像读者那样改代码：把 old 换成 new。"""
        source = (self.folder / name).read_text(encoding="utf-8")
        assert source.count(old) >= 1, f"{name} 里没有 {old}"
        self.write(name, source.replace(old, new, 1))

    def edit(self, name, **constants):
        """改脚本开头的常量；值是写进脚本的源代码。"""
        source = (self.folder / name).read_text(encoding="utf-8")
        for constant, value in constants.items():
            source, n = re.subn(rf"^(\s*{constant}(?:: \w+)? = ).*", lambda m: m[1] + str(value), source, count=1, flags=re.M)
            assert n == 1, f"{name} 里没有 {constant}"
        self.write(name, source)

    def start(self, name, **environ):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        return subprocess.Popen([sys.executable, self.folder / name], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, name, **environ):
        """运行脚本，返回 (退出码, 标准输出, 标准错误)。"""
        process = self.start(name, **environ)
        out, error = (stream.decode("utf-8").replace("\r\n", "\n") for stream in process.communicate(timeout=300))
        return process.returncode, out, error

    def run_here(self, name, *arguments, stdout=None):
        """和 run 一样，只是就在这个进程里运行，不用再导入一遍 torch。stdout：换掉标准输出。"""
        modules = {m: sys.modules.pop(m, None) for m in ("gpt", "tokenizer")}
        path, argv, error, code = sys.path[:], sys.argv, io.StringIO(), 0
        sys.path.insert(0, str((self.folder / name).parent))
        sys.argv = [str(self.folder / name), *map(str, arguments)]
        out = io.StringIO() if stdout is None else stdout
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
            error.write(f"{e.code}\n" if isinstance(e.code, str) else "")
        except BaseException:  # Python 会打印调用栈
            code = 1
            error.write(traceback.format_exc())
        finally:
            sys.path[:], sys.argv = path, argv
            for name, module in modules.items():  # 副本里的模块不能留给后面的测试
                sys.modules.pop(name, None)
                if module:
                    sys.modules[name] = module
        return code, out.getvalue() if isinstance(out, io.StringIO) else "", error.getvalue()

    def fails(self, name, *words):
        """运行 name：一句话（里面有 words），退出码 1，没有调用栈，什么也没有打印。"""
        code, out, error = self.run_here(name)
        assert (code, out, len(error.splitlines())) == (1, "", 1) and "Traceback" not in error, error
        assert all(word in error for word in words), error
        return error


@pytest.fixture
def lesson(tmp_path):
    return Lesson(tmp_path / "另一个 文件夹")


@pytest.fixture
def small(lesson):
    """一次几秒钟的小训练：一层，200 首诗，12 步，每 4 步评估、存档；已有一个旧的 ckpt.pt。"""
    lesson.edit("gpt.py", **TINY)
    lesson.edit("train.py", **QUICK)
    lesson.write("data/poems.txt", "".join((ROOT / "data" / "poems.txt").read_text(encoding="utf-8").splitlines(True)[:200]))
    lesson.write("ckpt.pt", b"old")
    return lesson
