"""测试共用的东西：让测试找得到脚本，备好一个小模型和脚本的副本。"""
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from gpt import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)  # 小模型用一个线程最快，也不和别的进程争


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


@pytest.fixture
def edited(tmp_path):
    """把脚本复制到临时文件夹，改掉常量：edited("generate.py", N_POEMS=1) 返回改好的脚本的路径。

    值是写进脚本的源代码；ckpt.pt 和 poems.txt 也在副本里。
    """
    for name in ("generate.py", "gpt.py", "train.py", "tokenizer.py", "ckpt.pt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "poems.txt", tmp_path / "data")

    def edit(script, **constants):
        path = tmp_path / script
        source = path.read_text(encoding="utf-8")
        for name, value in constants.items():
            source, n = re.subn(rf"^(\s*{name}(?:: \w+)? = ).*", lambda m: m[1] + str(value), source, count=1, flags=re.M)
            assert n == 1, f"{script} 里没有 {name}"
        path.write_text(source, encoding="utf-8")
        return path
    return edit
