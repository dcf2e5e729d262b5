"""GPT：和上一课一样的模型，这一课加上 generate（生成）和 KV 缓存。

跟着课文读，课文里的每一段代码在这里：

    温度、top-k              sample
    不用缓存、用缓存         GPT.generate
    缓存、错开的掩码         CausalSelfAttention.forward
    位置从 start 数起        GPT.forward

练习 1 写在「练习 1 的答案」那一行的下面；练习 3 把 GPTConfig 的 block_size 改成 512。
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    """模型的尺寸。不合理时抛出 BadValue。"""

    block_size: int = 128  # 一次最多看多少个词元
    vocab_size: int = 6289  # 词表里有多少个字
    n_layer: int = 4  # 层数
    n_head: int = 4  # 每层有多少个注意力头
    n_embd: int = 128  # 每个词元的向量有多少维
    dropout: float = 0.0  # 训练时随机丢掉多少，防止死记硬背；只训练几分钟，用不着，所以是 0

    def __post_init__(self):
        check_config(self)


class CausalSelfAttention(nn.Module):
    """多头因果自注意力：每个位置只看自己和前面。"""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)  # q、k、v 一次算出来
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None):
        """(B, T, C) -> (B, T, C)。cache：这一层存 k、v 的字典，新的 k、v 也会存进去。"""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 各 (B, n_head, T, head_size)
        if cache is not None:  # KV 缓存：把之前算过的 K、V 接在前面，不用重算
            if "k" in cache:
                k = torch.cat([cache["k"], k], dim=2)
                v = torch.cat([cache["v"], v], dim=2)
            cache["k"], cache["v"] = k, v

        # 掩码，1 是看得见。一行一个 q，一列一个 k；新来的字排在最后，所以三角形往右错开 total - T
        #
        #     不用缓存，T = 4，total = 4：   1 0 0 0      用缓存，T = 1，total = 4：   1 1 1 1
        #                                    1 1 0 0
        #                                    1 1 1 0
        #                                    1 1 1 1
        total = k.size(2)
        mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)

        scores = q @ k.transpose(2, 3) / math.sqrt(k.size(3))  # (B, n_head, T, total)
        scores = scores.masked_fill(~mask, float("-inf"))  # 后面的字不许看：softmax 之后是 0
        y = F.softmax(scores, dim=-1) @ v  # (B, n_head, T, head_size)
        y = y.transpose(1, 2).reshape(B, T, C)  # 把几个头拼回去
        return self.proj(y)


class Block(nn.Module):
    """一层：x 归一化、做注意力，结果加回 x；再归一化、过 MLP，结果也加回 x。"""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x, cache=None):
        """(B, T, C) -> (B, T, C)。cache：这一层的缓存。"""
        y = self.attn(self.ln_1(x), cache)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.proj(F.gelu(self.fc(self.ln_2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """GPT-2 式的解码器（Radford 等，2019）：先归一化，位置嵌入也是学出来的，激活函数是 GELU。"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # 字的嵌入
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # 位置的嵌入
        self.dropout = config.dropout
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

        # 每层有两个 proj，结果都加回 x：开始时小一些，层数多了才不会越加越大
        small = 0.02 / math.sqrt(2 * config.n_layer)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=small if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, caches=None, start=0):
        """算出每个位置上下一个字的分数。位置超出 block_size 时抛出 BadValue。

        idx、targets：(B, T) 的编号；caches：每层一个字典，会被更新；start：缓存里已有多少个字。
        返回 logits (B, T, vocab_size) 和 loss（平均交叉熵，nat/字；没有 targets 时为 None）。
        """
        end = start + idx.size(1)
        block_size = self.config.block_size
        check(end <= block_size, "词元的个数", end, f"不超过 block_size（{block_size}）的数")
        x = self.wte(idx) + self.wpe.weight[start:end]  # 新字的位置从 start 数起，不是从 0
        x = F.dropout(x, self.dropout, self.training)  # (B, T, C)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache)
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        if targets is None:
            return logits, None
        logits_32 = logits.float()  # 训练时 logits 可能是 16 位的，算损失用 32 位
        return logits, F.cross_entropy(logits_32.flatten(0, 1), targets.flatten())

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None,
                 use_cache=True, stop=None):
        """在提示词 idx (B, T) 后面写 max_new_tokens 个字，返回 (B, T + 字数) 的编号。

        temperature、top_k、top_p：见 sample；use_cache：用不用 KV 缓存，结果一样；
        stop：写出这个编号就停。模型最多看最后 block_size 个字。参数不合理时抛出 BadValue。
        """
        check_generate(self.config, idx, max_new_tokens, temperature, top_k, top_p, stop)
        text = idx
        caches = [{} for _ in self.blocks]
        start = 0  # 缓存里已有多少个字
        done = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # (B, 1)，哪几行写完了
        with evaluating(self):
            for _ in range(max_new_tokens):
                idx = text[:, -self.config.block_size:]  # 模型看得见的一段
                if text.size(1) > self.config.block_size:
                    use_cache = False  # 窗口往后滑，每个字的位置都变了，缓存只能作废
                if use_cache:
                    # 第一步把整段提示词送进去；之后每步只送最新的一个词元，前面的 K、V 从缓存里取
                    logits, _ = self(idx[:, start:], caches=caches, start=start)
                    start = idx.size(1)
                else:
                    logits, _ = self(idx)  # 不用缓存：每一步都把整段序列从头算一遍
                next_id = sample(logits, temperature, top_k, top_p)  # (B, 1)
                if stop is not None:
                    next_id = next_id.masked_fill(done, stop)  # 写完的几行以后只补 stop
                    done = next_id == stop
                text = torch.cat([text, next_id], dim=1)
                if done.all():
                    break
        return text.clone()  # 复制成普通的张量，可以再拿去训练


def sample(logits, temperature=1.0, top_k=None, top_p=None):
    """按最后一个位置的分数选下一个字：(B, T, vocab_size) -> (B, 1) 的编号。

    temperature：0 表示直接选分数最高的字；top_k：只在概率最高的 k 个字里选；
    top_p：只在累计概率刚达到 p 的那些字里选；两个都给时，先 top-k 后 top-p。
    """
    if temperature < 1e-6:  # 0 不能做除数
        return logits[:, -1, :].argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k > logits.size(-1):
        top_k = None  # k 比词表还大，就等于不限制
    logits = logits[:, -1, :] / temperature
    if top_k is not None:
        kth = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1:
        logits = keep_top_p(logits, top_p)
    # 课文里的 torch.multinomial 换了机器就抽出别的字，这里用文件后面的 multinomial，处处一样
    next_id = multinomial(F.softmax(logits, dim=-1), num_samples=1)
    return next_id


# 练习 1 的答案：先自己写，再往下看
def keep_top_p(logits, top_p):
    """top-p（核采样，Holtzman 等，2020）：(B, vocab_size) 的分数，去掉的字变成负无穷。

    从概率最高的开始往下加，跨过 top_p 的那个字也留下，所以至少留一个。
    """
    probs = F.softmax(logits.double(), dim=-1)  # 用 64 位累加，6,289 个数的舍入才不碍事
    ranked = probs.sort(dim=-1, descending=True).values
    n = (ranked.cumsum(dim=-1) < top_p - 1e-6).sum(dim=-1, keepdim=True)  # 加到第几个还不够 p
    pth = ranked.gather(-1, n)  # 再加一个就够了：它的概率是留下来的字里最小的
    return logits.masked_fill(probs < pth, float("-inf"))


# 以下只管抽签、状态和检查，课文不讲
def multinomial(probs, num_samples=1):
    """按概率抽签，不放回：(..., n) 的概率 -> (..., num_samples) 的编号。

    代替 torch.multinomial：它在不同的处理器、不同的版本上抽出来的字不一样。做法和它相同：
    给每个字掷一个随机数 E = -log(1 - u)，概率 / E 最大的中选；可以证明，选中的机会正好等于概率。
    u 来自 CPU 上的 torch.rand，处处一样，听 torch.manual_seed 的。参数不合理时抛出 BadValue。
    """
    n = probs.size(-1)
    check(is_integer(num_samples) and 1 <= num_samples <= n,
          "num_samples", num_samples, f" 1 到 {n} 的整数")
    u = torch.rand(probs.shape, dtype=torch.float64, device="cpu")  # 0 到 1 的均匀随机数
    race = probs.cpu() / -torch.log1p(-u)
    if num_samples == 1:
        best, winner = race.max(dim=-1, keepdim=True)  # 和 topk(1) 一样，只是快一些
    else:
        best, winner = race.topk(num_samples, dim=-1)
    if not (probs.min() >= 0 and best.min() > 0 and best.max() < math.inf):
        raise BadValue("probs 应为不小于 0 的有限数，不能全是 0，也不能有 nan："
                       "分数算对了吗？是不是把所有的字都设成了负无穷？")
    return winner.to(probs.device)


@contextmanager
def evaluating(model):
    """模型换到 eval 状态：不丢弃（dropout），也不算梯度；用完恢复原来的状态。

    inference_mode 和 no_grad 一样不算梯度，再快一成。
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


class BadValue(ValueError):
    """一个值不合理；说的是哪个值，应为什么，得到什么。脚本只把这一种错误变成一句话。"""


def check(ok, name, value, allowed):
    """ok 不成立时抛出 BadValue：名字，应为什么，得到什么。"""
    if not ok:
        raise BadValue(f"{name} 应为{allowed}，得到 {value!r}")


def is_integer(value):
    """是不是整数；True 和 False 不算。"""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value):
    """是不是有限的数；True 和 False 不算，分数（Fraction）不能和张量一起算，也不算。"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def check_config(config):
    """检查模型的尺寸。"""
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
        value = getattr(config, name)
        check(is_integer(value) and value >= 1, name, value, "不小于 1 的整数")
    dropout = config.dropout
    check(is_number(dropout) and 0 <= dropout <= 0.9, "dropout", dropout, " 0 到 0.9 的数")
    check(config.n_embd % config.n_head == 0, "n_embd", config.n_embd,
          f" n_head（{config.n_head}）的整数倍")


def check_sampling(temperature, top_k, top_p):
    """检查 sample 的参数；top_k、top_p 是 None 表示不限制。"""
    check(is_number(temperature) and temperature >= 0,
          "temperature", temperature, "不小于 0 的数，最大 1e300")
    if top_k is not None:
        check(is_integer(top_k) and top_k >= 1, "top_k", top_k, "不小于 1 的整数，或者 None")
    if top_p is not None:
        check(is_number(top_p) and 0 < top_p <= 1,
              "top_p", top_p, " 0 到 1 的数（不含 0），或者 None")


def check_generate(config, idx, max_new_tokens, temperature, top_k, top_p, stop):
    """检查 generate 的参数。"""
    check_sampling(temperature, top_k, top_p)
    check(is_integer(max_new_tokens) and max_new_tokens >= 0,
          "max_new_tokens", max_new_tokens, "不小于 0 的整数")
    last = config.vocab_size - 1
    if stop is not None:
        check(is_integer(stop) and 0 <= stop <= last,
              "stop", stop, f" 0 到 {last} 的编号，或者 None")
    check(idx.numel() > 0,
          "idx 的形状", tuple(idx.shape), "至少有 1 个字的 (B, T)，从头写就给换行符")
    for i in (idx.min().item(), idx.max().item()):
        check(0 <= i <= last, "idx 里的编号", i, f" 0 到 {last} 的整数")
