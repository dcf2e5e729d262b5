"""测试共用的东西：一份脚本的副本、一个小模型、像读者那样改脚本再运行的 Lesson。

测试只碰副本，不碰读者的文件：文件夹里的 ckpt.pt、snapshot.pt 一个也动不到。副本里，README 建议改的
常量改回课程自带的值，代码照旧：读者做着练习，测试也照样能跑。
"""
import ast
import contextlib
import hashlib
import io
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {  # README 建议读者改的常量，课程自带的值
    "gpt.py": {"block_size": 128},
    "train.py": {"BATCH_SIZE": 10, "RESUME": False, "DEVICE": "'cpu'"},
    "generate.py": {
        "SEED": 2725, "PROMPTS": ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风"),
        "TEMPERATURES": (0.3, 1.0, 1.5), "TOP_P": None, "OPENINGS": ("床前明月光，", "大漠孤烟直，", "人工智能"),
        "HEADS": (("春眠不觉", 7), ("学无止境", 5)), "QUATRAIN": False, "LENGTHS": (32, 64, 120)}}
SHIPPED_CKPT = "0d19ae1f8e6e6dc6ff188e91d4c3b50fea81886e73ed6740a21d74387ecaa43e"  # ckpt.pt 的 SHA-256
TINY = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16}
QUICK = {"MAX_STEPS": 12, "EVAL_EVERY": 4, "BATCH_SIZE": 4, "WARMUP_STEPS": 3, "DECAY_STEPS": 6}


def set_constant(source, name, value):
    """把源代码里的 name = … 换成 name = value（注解留着）；值是写进源代码的文字。"""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.col_offset <= 4 and \
                [getattr(target, "id", None) for target in targets] == [name]:
            kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
            lines[node.lineno - 1:node.end_lineno] = [" " * node.col_offset + f"{name}{kind} = {value}"]
            return "\n".join(lines)
    raise AssertionError(f"没有常量 {name}")


def copy_lesson(folder):
    """把课程复制到 folder，README 建议改的常量改回课程自带的值。"""
    (folder / "data").mkdir(parents=True)
    for name in ("generate.py", "gpt.py", "train.py", "tokenizer.py", "ckpt.pt", "data/poems.txt", "data/prepare.py"):
        shutil.copy(ROOT / name, folder / name)
        if name in SHIPPED:
            source = (folder / name).read_text(encoding="utf-8")
            for constant, value in SHIPPED[name].items():
                source = set_constant(source, constant, value)
            (folder / name).write_text(source, encoding="utf-8", newline="\n")
    return folder


COPY = copy_lesson(Path(tempfile.mkdtemp(prefix="lesson-")) / "copy")
sys.path[:0] = [str(COPY), str(COPY / "data"), str(ROOT / "tests")]

import torch  # noqa: E402

from gpt import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)  # 小模型用一个线程最快，也不和别的进程争
os.environ.pop("PYTHONUNBUFFERED", None)  # 子进程的输出，像平常那样攒一攒再写
signal.signal(signal.SIGINT, signal.default_int_handler)  # 用 nohup、& 启动的，子进程也听得见 Ctrl-C

# 读者自己训练了 ckpt.pt：只看课程自带的那一个的测试就跳过，说明为什么；CI 上不跳过，不同就是错
own_ckpt = hashlib.sha256((ROOT / "ckpt.pt").read_bytes()).hexdigest() != SHIPPED_CKPT
shipped = pytest.mark.skipif(own_ckpt and os.environ.get("CI") != "true",
                             reason="ckpt.pt 不是课程自带的（是你自己训练的吧），这里只检查课程自带的那一个")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: 几分钟的测试，平时不跑；.ci/run 用 -m slow 另外跑")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_make_parametrize_id(val, argname):
    """参数是汉字时，用参数的名字做记号：pytest 会把汉字写成 \\u4e00 这样的。"""
    return argname if isinstance(val, str) and not val.isascii() else None


def pytest_unconfigure(config):
    shutil.rmtree(COPY.parent, ignore_errors=True)


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


def kill_later(process, seconds=300):
    """不结束的程序，不等它；已经结束的，不受影响。"""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return process


class Lesson:
    """临时文件夹里的一份课程：改哪个文件就复制哪个，其余链接到上面的副本。"""

    def __init__(self, folder):
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        for name in ("generate.py", "gpt.py", "train.py", "tokenizer.py", "ckpt.pt", "data/poems.txt"):
            try:
                os.link(COPY / name, folder / name)
            except OSError:  # 不在同一个磁盘上
                shutil.copy(COPY / name, folder / name)

    def write(self, name, content):
        """换掉一个文件，不碰它链接着的原件。content：str 或 bytes。"""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def read(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def replace(self, name, old, new):
        """像读者那样改代码：把 old 换成 new。"""
        source = self.read(name)
        assert old in source, f"{name} 里没有 {old}"
        self.write(name, source.replace(old, new, 1))

    def edit(self, name, **constants):
        """改脚本开头的常量；值是写进脚本的源代码。"""
        source = self.read(name)
        for constant, value in constants.items():
            source = set_constant(source, constant, value)
        self.write(name, source)

    def start(self, name, **environ):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        return kill_later(subprocess.Popen(
            [sys.executable, self.folder / name], env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE))

    def run(self, name, **environ):
        """运行脚本，返回 (退出码, 标准输出, 标准错误)。"""
        process = self.start(name, **environ)
        out, error = (stream.decode("utf-8").replace("\r\n", "\n") for stream in process.communicate())
        return process.returncode, out, error

    def run_here(self, name, *arguments, stdout=None):
        """和 run 一样，只是就在这个进程里运行，不用再导入一遍 torch。stdout：换掉标准输出。"""
        modules = {m: sys.modules.pop(m, None) for m in ("gpt", "tokenizer")}
        path, argv, error, code = sys.path[:], sys.argv, io.StringIO(), 0
        sys.path.insert(0, str((self.folder / name).parent))
        sys.argv = [str(self.folder / name), *map(str, arguments)]
        out = io.StringIO() if stdout is None else stdout
        torch.backends.mkldnn.enabled = True  # generate.py 会关掉它，train.py 不该受影响
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
    poems = (COPY / "data" / "poems.txt").read_text(encoding="utf-8").splitlines(True)[:200]
    lesson.write("data/poems.txt", "".join(poems))
    lesson.write("ckpt.pt", b"old")
    return lesson
