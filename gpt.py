"""GPT：和上一课一样的模型，这一课加上 generate（生成）和 KV 缓存。

从上往下读：尺寸、注意力（KV 缓存在这里）、一层、整个模型（生成在这里）、选字、读检查点。
练习 3：把 GPTConfig 的 block_size 改成 512。
"""
import io
import math
import os
import sys
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from tokenizer import Tokenizer


@dataclass
class GPTConfig:
    """模型的尺寸。不合理时抛出 ValueError。"""

    block_size: int = 128  # 一次最多看多少个词元
    vocab_size: int = 6289  # 词表里有多少个字
    n_layer: int = 4  # 层数
    n_head: int = 4  # 每层有多少个注意力头
    n_embd: int = 128  # 每个词元的向量有多少维
    dropout: float = 0.0  # 训练时随机丢掉多少，防止死记硬背；训练得不久，用不着

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            check(f"GPTConfig 的 {name}", getattr(self, name), Integral, lambda n: n >= 1, "不小于 1 的整数")
        check("GPTConfig 的 n_embd", self.n_embd, Integral, lambda n: n % self.n_head == 0,
              f" n_head（{self.n_head}）的整数倍")
        check("GPTConfig 的 dropout", self.dropout, Real, lambda p: 0 <= p < 1, "不小于 0、小于 1 的数")


class CausalSelfAttention(nn.Module):
    """多头因果自注意力：每个位置只看自己和前面。"""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)  # q、k、v 一次算出来
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x, cache=None):
        """x：(B, T, C)；cache：这一层的字典，会被更新。返回 (B, T, C)。"""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # 各 (B, n_head, T, head_size)
        if cache is not None:  # KV 缓存：把之前算过的 K、V 接在前面，不用重算
            if "k" in cache:
                k = torch.cat([cache["k"], k], dim=2)
                v = torch.cat([cache["v"], v], dim=2)
            cache["k"], cache["v"] = k, v
        mask = None  # 只来 1 个新字时，它排在最后，所有的 k 都能看，用不着掩码
        if T > 1:
            total = k.size(2)
            mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, n_head, T, head_size)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """一层：先归一化再注意力，先归一化再 MLP，各加回原来的 x。"""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x, cache=None):
        """x：(B, T, C)。返回 (B, T, C)。"""
        x = x + self.attn(self.ln_1(x), cache)
        y = self.proj(F.gelu(self.fc(self.ln_2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """GPT-2 式的解码器（Radford 等，2019）：归一化在前，位置嵌入靠学习，GELU。"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # 字的嵌入
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # 位置的嵌入
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # 加回 x 的两处缩小一些，层数多了才不会越加越大
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, caches=None, start=0):
        """算出每个位置上下一个字的分数。

        idx：(B, T) 的编号；targets：(B, T)，每个位置的正确答案；caches：每层一个字典的 list，会被更新；
        start：idx 的第一个字排在第几个位置，也就是缓存里已有多少个字。
        返回 (logits, loss)：logits 是 (B, T, vocab_size)；loss 是平均交叉熵，单位 nat/字，没有 targets 时为 None。
        位置超出 block_size 时抛出 ValueError。
        """
        T = idx.size(1)
        if start + T > self.config.block_size:
            raise ValueError(f"一次最多看 block_size={self.config.block_size} 个词元，得到 {start + T} 个，请截短")
        x = self.wte(idx) + self.wpe.weight[start:start + T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True, stop=None):
        """在 idx 后面一个字一个字地写。超过 block_size 时，模型只看最后 block_size 个字。

        idx：(B, T) 的提示词编号，T ≥ 1；max_new_tokens：最多写几个字；temperature、top_k、top_p：见 sample；
        use_cache：用不用 KV 缓存，结果一样；stop：写出这个编号就停，一批里先写完的用它补齐。
        返回 (B, T + 写的字数)，开头是提示词。参数不合理时抛出 ValueError。
        """
        check_sampling(temperature, top_k, top_p)
        check_prompt(idx, max_new_tokens, stop, self.config.vocab_size)
        training = self.training
        self.eval()  # 生成时不丢弃（dropout），写完再恢复原来的状态
        try:
            text = idx  # 写到现在的全文；idx 是模型这一步看到的部分
            caches, start = [{} for _ in self.blocks], 0
            done = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # (B, 1)，哪几行写完了
            for _ in range(max_new_tokens):
                if idx.size(1) > self.config.block_size:  # 窗口往后滑，每个字的位置都变了，缓存只能作废
                    idx = idx[:, -self.config.block_size:]
                    caches, start = [{} for _ in self.blocks], 0
                if use_cache:
                    # 第一步把整段提示词送进去；之后每步只送最新的一个词元，前面的 K、V 从缓存里取
                    logits, _ = self(idx[:, start:], caches=caches, start=start)
                    start = idx.size(1)
                else:
                    logits, _ = self(idx)  # 不用缓存：每一步都把整段序列从头算一遍
                next_id = sample(logits, temperature, top_k, top_p)
                if stop is not None:
                    next_id = next_id.masked_fill(done, stop)
                    done = next_id == stop
                idx = torch.cat([idx, next_id], dim=1)
                text = torch.cat([text, next_id], dim=1)
                if stop is not None and done.all():
                    break
            return text
        finally:
            self.train(training)


def sample(logits, temperature=1.0, top_k=None, top_p=None):
    """按最后一个位置的分数选下一个字。

    logits：(B, T, vocab_size)；temperature：分数先除以它，0 表示直接选分数最高的字；
    top_k：只在概率最高的 k 个字里选；top_p：只在累计概率刚达到 p 的那些字里选；都给时先 top-k 后 top-p。
    返回 (B, 1) 的编号。
    """
    if temperature < 1e-6:  # 0 不能做除数
        return logits[:, -1, :].argmax(dim=-1, keepdim=True)
    logits = logits[:, -1, :] / temperature
    if top_k is not None:
        top_k = min(top_k, logits.size(-1))
        kth = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        logits = logits.masked_fill(outside_top_p(logits, top_p), float("-inf"))
    next_id = multinomial(F.softmax(logits, dim=-1), num_samples=1)
    return next_id


def outside_top_p(logits, top_p):
    """top-p（核采样，Holtzman 等，2020）要去掉哪些字。logits 和返回的布尔张量都是 (B, vocab_size)。

    从概率最高的开始往下加，加到 top_p 为止，跨过 top_p 的那个字留下，至少留一个；容许 1e-6 的舍入误差。
    """
    probs, order = F.softmax(logits.double(), dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs  # 排在它前面的字一共占多少概率
    remove = before >= top_p - 1e-6 if top_p < 1 else torch.zeros_like(before, dtype=torch.bool)
    remove[:, 0] = False
    return torch.zeros_like(remove).scatter(-1, order, remove)


def multinomial(probs, num_samples=1):
    """按概率抽签，代替 torch.multinomial：它在不同的处理器、不同的版本上抽出来的字不一样。

    probs：(..., n) 的概率，不必加起来等于 1；num_samples：抽几个，不放回。返回 (..., num_samples) 的编号。
    做法和它相同（指数赛跑）：每个字用时 Exp(1) / 概率，谁先跑到就选谁，选中的机会正好等于概率。
    随机数来自 CPU 上的 torch.rand，听 torch.manual_seed 的。参数不合理时抛出 ValueError。
    """
    check("num_samples", num_samples, Integral, lambda n: 1 <= n <= probs.size(-1), f" 1 到 {probs.size(-1)} 的整数")
    if not (probs.min() >= 0 and 0 < probs.sum(dim=-1).min() < math.inf):
        raise ValueError("probs 应为不小于 0 的有限数，不能全是 0，也不能有 nan，请检查分数是怎么算的")
    noise = torch.rand(probs.shape, dtype=torch.float64).neg_().log1p_().neg_()  # -log(1 - 均匀随机数)，就是 Exp(1)
    race = probs.cpu() / noise
    winner = race.argmax(dim=-1, keepdim=True) if num_samples == 1 else race.topk(num_samples, dim=-1).indices
    return winner.to(probs.device)


def load_checkpoint(path):
    """读 train.py 写的检查点，返回 (model, tokenizer, training)；model 在 CPU 上，training 是训练时记下的数字。

    没有这个文件时抛出 FileNotFoundError，内容不对时抛出 ValueError。
    weights_only=True：只读数字和文字，别人给的文件不能借机运行代码。
    """
    path = Path(path)
    again = "请用 git checkout ckpt.pt 取回课程自带的，或者运行 python train.py 重新训练"
    if not path.exists():
        raise FileNotFoundError(f"找不到 {path}，{again}")
    raw = io.BytesIO(path.read_bytes())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 坏文件会引来一串警告，下面的一句话就够了
            ckpt = torch.load(raw, map_location="cpu", weights_only=True)
        tokenizer = Tokenizer(ckpt["chars"])
        config = GPTConfig(**ckpt["config"])
        check(f"{path} 里的词表", len(tokenizer), int, lambda n: n == config.vocab_size, f" {config.vocab_size} 个字")
        model = GPT(config)
        model.load_state_dict(ckpt["model"])
        return model.eval(), tokenizer, ckpt["training"]
    except Exception as e:  # 坏文件的坏法很多，torch.load 抛出的错误也就各式各样
        raise ValueError(f"{path} 不是这一课能用的检查点（{type(e).__name__}），可能没有下载完整，或者来自别的程序：{again}") from None


def check(name, value, kind, ok, allowed):
    """value 不是 kind 类型、或者 ok(value) 不成立时，抛出 ValueError：谁、应为什么、得到什么。"""
    if not (isinstance(value, kind) and ok(value)):
        raise ValueError(f"{name} 应为{allowed}，得到 {value!r}")


def check_sampling(temperature, top_k, top_p, names=("temperature", "top_k", "top_p")):
    """检查选字的三个参数，不合理时抛出 ValueError；names 是报错时用的名字。"""
    check(names[0], temperature, Real, lambda t: 0 <= t < math.inf, "不小于 0 的数（0 表示每次都选概率最高的字）")
    if top_k is not None:
        check(names[1], top_k, Integral, lambda k: k >= 1, "不小于 1 的整数，不限制就写 None")
    if top_p is not None:
        check(names[2], top_p, Real, lambda p: 0 < p <= 1, "大于 0、不大于 1 的数，不限制就写 None")


def check_prompt(idx, max_new_tokens, stop, vocab_size):
    """检查 generate 的其余参数，不合理时抛出 ValueError。"""
    check("max_new_tokens", max_new_tokens, Integral, lambda n: n >= 0, "不小于 0 的整数")
    if stop is not None:
        check("stop", stop, Integral, lambda i: 0 <= i < vocab_size, f" 0 到 {vocab_size - 1} 的编号，不需要就写 None")
    if not isinstance(idx, torch.Tensor) or idx.dtype not in (torch.int64, torch.int32) or idx.dim() != 2:
        got = f"{idx.dtype}、形状 {tuple(idx.shape)}" if isinstance(idx, torch.Tensor) else type(idx).__name__
        raise ValueError(f"idx 应为 (B, T) 的整数张量（torch.long），得到 {got}")
    if idx.numel() == 0:
        raise ValueError(f"idx 应至少有 1 个字，得到形状 {tuple(idx.shape)}；想从头写，就用换行符做提示词")
    low, high = int(idx.min()), int(idx.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"idx 里的编号应为 0 到 {vocab_size - 1}，得到 {low if low < 0 else high}")


def start_script():
    """脚本一开始调用：输出一律用 UTF-8，出错时只在标准错误上写一句话，退出码是 1。"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # IDLE、Jupyter 的输出没有这个方法，本来就是 UTF-8
            stream.reconfigure(encoding="utf-8", line_buffering=True)
    sys.excepthook = explain_error


def explain_error(kind, error, traceback):
    """把错误变成一句话；不是我们预料之中的错误，照常打印调用栈，方便改代码的人查找。"""
    if issubclass(kind, BrokenPipeError):  # 输出接到 head 之类的程序，它先结束了
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif issubclass(kind, KeyboardInterrupt):
        print("\n已停止。", file=sys.stderr)
    elif issubclass(kind, OSError) and error.filename:
        print(f"{error.filename} 读写不了：{error.strerror}", file=sys.stderr)
    elif issubclass(kind, (ValueError, OSError)):
        print(error, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
