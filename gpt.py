"""GPT：和上一课一样的模型，这一课加上 generate（生成）和 KV 缓存。

从上往下读：尺寸、注意力（KV 缓存在这里）、一层、整个模型（生成在这里）、选字，最后是练习 1 的答案。
练习 3：把 GPTConfig 的 block_size 改成 512。
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real

import torch
import torch.nn as nn
import torch.nn.functional as F


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
        check(1, **{name: value for name, value in vars(self).items() if name != "dropout"})
        check(0, 0.9, Real, dropout=self.dropout)
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd 应为 n_head（{self.n_head}）的整数倍，得到 {self.n_embd}")


class CausalSelfAttention(nn.Module):
    """多头因果自注意力：每个位置只看自己和前面。"""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)  # q、k、v 一次算出来
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None):  # (B, T, C) -> (B, T, C)；cache：这一层的字典，会被更新
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 各 (B, n_head, T, head_size)
        if cache is not None:  # KV 缓存：把之前算过的 K、V 接在前面，不用重算
            if "k" in cache:
                k = torch.cat([cache["k"], k], dim=2)
                v = torch.cat([cache["v"], v], dim=2)
            cache["k"], cache["v"] = k, v
        total = k.size(2)
        mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)
        scores = q @ k.transpose(2, 3) / math.sqrt(k.size(3))  # (B, n_head, T, total)
        scores = scores.masked_fill(~mask, float("-inf"))  # 后面的字不许看：softmax 之后是 0
        y = F.softmax(scores, dim=-1) @ v  # (B, n_head, T, head_size)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


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

    def forward(self, x, cache=None):  # (B, T, C) -> (B, T, C)
        x = x + F.dropout(self.attn(self.ln_1(x), cache), self.dropout, self.training)
        y = self.proj(F.gelu(self.fc(self.ln_2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """GPT-2 式的解码器（Radford 等，2019）：归一化在前，位置嵌入靠学习，GELU。"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # 字的嵌入
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # 位置的嵌入
        self.dropout = config.dropout
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        small = 0.02 / math.sqrt(2 * config.n_layer)  # 加回 x 的两处小一些，层数多了才不会越加越大
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=small if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, caches=None, start=0):
        """算出每个位置上下一个字的分数。位置超出 block_size 时抛出 ValueError。

        idx、targets：(B, T) 的编号；caches：每层一个字典，会被更新；start：缓存里已有多少个字。
        返回 logits (B, T, vocab_size) 和 loss（平均交叉熵，nat/字；没有 targets 时为 None）。
        """
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"最多看 block_size={self.config.block_size} 个词元，得到 {end} 个")
        x = self.wte(idx) + self.wpe.weight[start:end]  # (B, T, C)
        x = F.dropout(x, self.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches is not None else None)
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True,
                 stop=None):
        """在提示词 idx (B, T) 后面写 max_new_tokens 个字，返回 (B, T + 字数)。

        temperature、top_k、top_p：见 sample；use_cache：用不用 KV 缓存，结果一样；stop：写出这个编号
        就停，一批里先写完的用它补齐。模型最多看最后 block_size 个字。参数不合理时抛出 ValueError。
        """
        check_arguments(idx, temperature, top_k, top_p, self.config.vocab_size)
        caches, start = [{} for _ in self.blocks], 0
        done = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # (B, 1)，哪几行写完了
        with evaluating(self):  # 不丢弃（dropout），不算梯度
            for _ in range(max_new_tokens):
                if idx.size(1) > self.config.block_size:
                    # 窗口往后滑，每个字的位置都变了，缓存只能作废
                    logits, _ = self(idx[:, -self.config.block_size:])
                else:
                    if use_cache:
                        # 第一步把整段提示词送进去；之后每步只送最新的一个词元，前面的 K、V 从缓存里取
                        logits, _ = self(idx[:, start:], caches=caches, start=start)
                        start = idx.size(1)
                    else:
                        logits, _ = self(idx)  # 不用缓存：每一步都把整段序列从头算一遍
                next_id = sample(logits, temperature, top_k, top_p)  # (B, 1)
                if stop is not None:
                    next_id = next_id.masked_fill(done, stop)
                    done = next_id == stop
                idx = torch.cat([idx, next_id], dim=1)
                if stop is not None and done.all():
                    break
        return idx.clone()


def sample(logits, temperature=1.0, top_k=None, top_p=None):
    """按最后一个位置的分数选下一个字。(B, T, vocab_size) -> (B, 1) 的编号。

    temperature：0 表示直接选分数最高的字；top_k：只在概率最高的 k 个字里选；
    top_p：只在累计概率刚达到 p 的那些字里选；都给时先 top-k 后 top-p。
    """
    if temperature < 1e-6:  # 0 不能做除数
        return logits[:, -1, :].argmax(dim=-1, keepdim=True)
    logits = logits[:, -1, :] / temperature
    if top_k is not None:
        top_k = min(top_k, logits.size(-1))
        kth = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1:
        logits = keep_top_p(logits, top_p)
    # 课文里的 torch.multinomial 换了机器就抽出别的字，这里用下面的 multinomial，处处一样
    next_id = multinomial(F.softmax(logits, dim=-1), num_samples=1)
    return next_id


def multinomial(probs, num_samples=1):
    """按概率抽签：(..., n) -> (..., num_samples)，不放回。参数不合理时抛出 ValueError。

    代替 torch.multinomial：它在不同的处理器、不同的版本上抽出来的字不一样。做法和它相同（指数赛跑）：
    每个字用时 Exp(1) / 概率，谁先跑到就选谁，选中的机会正好等于概率；只是随机数来自 CPU 上的
    torch.rand，处处一样，听 torch.manual_seed 的。
    """
    check(1, probs.size(-1), num_samples=num_samples)
    noise = torch.rand(probs.shape, dtype=torch.float64, device="cpu")
    noise = noise.neg_().log1p_().neg_()  # -log(1 - 均匀随机数)，就是 Exp(1)
    race = probs.cpu() / noise
    speed, winner = race.max(dim=-1, keepdim=True) if num_samples == 1 else race.topk(num_samples, dim=-1)
    if not (probs.min().item() >= 0 and 0 < speed.min().item() and speed.max().item() < math.inf):
        raise ValueError("probs 应为不小于 0 的有限数，不能全是 0 或有 nan，请检查分数是怎么算的")
    return winner.to(probs.device)


# 练习 1 的答案：先自己写，再往下看
def keep_top_p(logits, top_p):
    """top-p（核采样，Holtzman 等，2020）：(B, vocab_size) 的分数，去掉的字变成负无穷。

    从概率最高的开始往下加，跨过 top_p 的那个字也留下，至少留一个；容许 1e-6 的舍入误差。
    """
    probs, order = F.softmax(logits.double(), dim=-1).sort(dim=-1, descending=True)
    n = (probs.cumsum(dim=-1) < top_p - 1e-6).sum(dim=-1, keepdim=True)  # 加到哪里还不够 p
    pth = logits.gather(-1, order.gather(-1, n))
    return logits.masked_fill(logits < pth, float("-inf"))


# 以下只管状态和检查，课文不讲
@contextmanager
def evaluating(model):
    """模型换到 eval 状态，不算梯度（inference_mode 比 no_grad 再快一成），用完恢复原来的状态。"""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def check(least, most=math.inf, kind=Integral, zero=True, **names):
    """names 里的值应为 least 到 most 的整数（kind=Real 时是数），否则抛出 ValueError，说出名字和值。"""
    for name, value in names.items():
        if (isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most
                or value == math.inf or value == 0 and not zero):
            allowed = f" {least} 到 {most} 的" if most < math.inf else f"不小于 {least} 的"
            allowed += ("整数" if kind is Integral else "数") + ("" if zero else "，不含 0")
            raise ValueError(f"{name} 应为{allowed}，得到 {value!r}")


def check_arguments(idx, temperature, top_k, top_p, vocab_size):
    """检查 generate 的参数；top_k、top_p 的 None 表示不限制。"""
    check(0, math.inf, Real, temperature=temperature)
    check(1, top_k=1 if top_k is None else top_k)
    check(0, 1, Real, zero=False, top_p=1 if top_p is None else top_p)
    if idx.numel() == 0:
        raise ValueError(f"idx 至少要有 1 个字，得到形状 {tuple(idx.shape)}；从头写就用换行符做提示词")
    for i in (idx.min().item(), idx.max().item()):
        check(0, vocab_size - 1, **{"idx 里的编号": i})
