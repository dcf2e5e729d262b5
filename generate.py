"""生成文字和 KV 缓存：课文里的六个演示，从上到下，一节一个函数。

一边读课文，一边运行 python generate.py。做练习时改下面的常量，再运行一遍；
python tests/diff.py 会告诉你，改了之后哪几行不一样。
"""
import errno
import math
import statistics
import sys
import time
from dataclasses import replace
from numbers import Real
from pathlib import Path

import torch
import torch.nn.functional as F

from gpt import GPT, GPTConfig, check, multinomial
from tokenizer import Tokenizer

SEED = 2725  # 随机种子：从 0 数起，第一个让课文对第 2 到 4 节的说法都成立的（见 tests/claims.py）
PROMPTS = ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风")  # 第 1 节：猜哪几段的下一个字
TEMPERATURES = (0.3, 1.0, 1.5)  # 第 2 节：比较哪几个温度，0 表示每次都选概率最高的字
N_POEMS = 3  # 第 2、3 节：每个温度写几首
TOP_K = 20  # 第 3 节：只从概率最高的几个字里选
TOP_P = None  # 练习 1：改成 0.9，第 3 节再用 top-p 写一遍
FILTER_TEMPERATURE = 1.5  # 第 3 节的温度
OPENINGS = ("床前明月光，", "大漠孤烟直，", "人工智能")  # 第 4 节：续写哪几个开头
HEADS = (("春眠不觉", 7), ("学无止境", 5))  # 第 5 节：每句开头的字，和每句几个字
QUATRAIN = False  # 练习 2：改成 True，第 5 节再写三首固定格式的七言绝句
LENGTHS = (32, 64, 120)  # 第 6 节：写多少个字来计时

torch.set_num_threads(1)  # 模型太小，几个线程只会互相等；机器一忙，第 6 节的快慢都会颠倒


# model（模型）、tokenizer（分词器）、BANNED（换行和标点的编号）由文件末尾的 load_checkpoint 读入
def encode(text):
    """文字 -> (1, T) 的编号张量。有词表外的字时抛出 ValueError。"""
    return torch.tensor([tokenizer.encode(text)])


def decode(ids):
    """编号的 list -> 文字。"""
    return tokenizer.decode(ids)


def write_poem(opening="", temperature=0.8, top_k=None, top_p=None):
    """从换行符和 opening 写到换行为止，返回一行文字；写满 80 个字还没完，就截断，加上省略号。"""
    ids, n = encode("\n" + opening), 80 - len(opening)
    ids = model.generate(ids, n, temperature, top_k, top_p, stop=NEWLINE)
    text = decode(ids[0].tolist())[1:]
    return text[:-1] if text.endswith("\n") else text + "……"


def show(n, write, *args):
    """重新设定随机种子，打印 write(*args) 写的 n 首诗。"""
    torch.manual_seed(SEED)
    for _ in range(n):
        print("    " + write(*args))


def probabilities():
    """原诗的「流」和「霜」都不在前 8 名里；「春风」后面是句号的概率，和它在语料里的比例差不多。"""
    print("== 1. 读完一段文字，模型给下一个字的概率（前 8 名）")
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(encode(prompt)[:, -model.config.block_size:])[0][0, -1]  # (vocab_size,)
        top = torch.topk(F.softmax(logits, dim=-1), 8)
        words = [f"{ch} {p:.1%}" for ch, p in zip(decode(top.indices.tolist()), top.values.tolist())]
        print(f"  「{prompt}」→ {'  '.join(words)}".replace("\n", "⏎"))


def temperatures():
    """温度 0.3 最通顺，可是用字常见，重复也多；1.0 用字丰富了，也有了生僻字；1.5 连格式也崩了。"""
    n = len(TEMPERATURES)
    print(f"== 2. 同样的随机种子，{'零一两三四五六七八九十'[n:n + 1] or n}个温度各写 {N_POEMS} 首")
    for temperature in TEMPERATURES:
        print(f"  温度 {temperature}：")
        show(N_POEMS, write_poem, "", temperature)


def filters():
    """温度还是 1.5，只是不许选靠后的字：格式恢复了，生僻字也不见了，又比温度 0.3 更有变化。"""
    print(f"== 3. 温度 {FILTER_TEMPERATURE}，但只从概率最高的 {TOP_K} 个字里选（top-k={TOP_K}）")
    show(N_POEMS, write_poem, "", FILTER_TEMPERATURE, TOP_K)
    if TOP_P is not None:  # 练习 1
        print(f"  温度 {FILTER_TEMPERATURE}，top-p={TOP_P}：")
        show(N_POEMS, write_poem, "", FILTER_TEMPERATURE, None, TOP_P)


def openings():
    """给了五个字和逗号，就接着写五言。唐朝没有的词也接得下去，因为每个字都在唐诗里出现过。"""
    print("== 4. 给出开头，让它续写")
    for opening in OPENINGS:
        show(1, write_poem, opening)


# 约束解码：heads 里的字依次做每句的开头，每句 n_char 个字；写的时候不许出现 BANNED 里的换行和标点。
# 和课文一字不差，只有 torch.multinomial 换成了 gpt.py 的 multinomial，在哪台机器上都抽出同样的字
@torch.no_grad()
def acrostic(heads, n_char=7, temperature=0.8):
    ids = encode("\n")
    for i, head in enumerate(heads):
        ids = torch.cat([ids, encode(head)], dim=1)  # 先把指定的字放进去
        for _ in range(n_char - 1):  # 再让模型一个字一个字地写完这一句
            logits = model(ids)[0][0, -1] / temperature
            logits[BANNED] = float("-inf")
            next_id = multinomial(F.softmax(logits, dim=-1), 1)
            ids = torch.cat([ids, next_id[None]], dim=1)
        ids = torch.cat([ids, encode("，。"[i % 2])], dim=1)  # 标点由我们加，保证格式
    return decode(ids[0].tolist()).strip()


def acrostics():
    """把每句的第一个字连起来读。"""
    print("== 5. 藏头诗：每句开头的字由我们指定，其余由模型写")
    for heads, n_char in HEADS:
        show(1, acrostic, heads, n_char)
    if QUATRAIN:  # 练习 2
        print("  七言绝句（固定格式）：")
        show(3, quatrain)


def timed(net, n, use_cache):
    """从换行符开始写 n 个字，返回 (文字的编号, 用了几毫秒)。"""
    torch.manual_seed(SEED)
    began = time.perf_counter()
    ids = net.generate(encode("\n"), n, use_cache=use_cache)
    return ids[0, 1:].tolist(), (time.perf_counter() - began) * 1000


def kv_cache():
    """先看结果：一字不差。再看时间：写的字越多，省下的越多。最后看代价：每个词元占多少内存。"""
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    if not LENGTHS:
        return
    net, config, longest = model, GPTConfig(vocab_size=len(tokenizer)), max(LENGTHS)
    block_size = config.block_size
    if replace(config, dropout=model.config.dropout) != model.config:  # 练习 3：还没有重新训练
        print(f"  gpt.py 的尺寸和 ckpt.pt 的不同（block_size {block_size}），"
              "这一节用随机初始化的模型来量")
        torch.manual_seed(SEED)
        net = GPT(config)
    plain, cached = (timed(net, longest, use_cache)[0] for use_cache in (False, True))  # 也算预热
    differ = [i for i in range(longest) if plain[i] != cached[i]]
    verdict = f"不一样，从第 {differ[0] + 1} 个字开始" if differ else "完全一样"
    print(f"  同样的随机种子，写 {longest} 个字：用缓存和不用缓存的结果{verdict}")
    for n in LENGTHS:
        pairs = [(timed(net, n, False)[1], timed(net, n, True)[1]) for _ in range(3)]  # 交替着量
        slow, fast = (statistics.median(column) for column in zip(*pairs))
        print(f"  写 {n:>3} 个字：不用缓存 {slow:>6.0f} 毫秒，用缓存 {fast:>5.0f} 毫秒，"
              f"快了 {slow / fast:.1f} 倍")
    if longest > block_size:
        print(f"  超过 block_size（{block_size}）之后窗口往后滑，每个字的位置都变了，"
              "缓存只能作废，省不了计算")
    caches = [{} for _ in net.blocks]
    with torch.no_grad():
        net(torch.full((1, block_size), NEWLINE), caches=caches)
    held = sum(kv.nbytes for cache in caches for kv in cache.values()) / 1024  # 真正占用的，单位 KB
    print(f"  这个模型每个词元的缓存：2 × {config.n_layer} 层 × {config.n_embd} 维"
          f" × {caches[0]['k'].itemsize} 字节 = {held / block_size:g} KB，{block_size} 个词元共 {held:g} KB")


# 练习 2 的答案：先自己写，再往下看
@torch.no_grad()
def quatrain(temperature=0.8):
    ids = encode("\n")
    for position in range(1, 33):
        logits = model(ids)[0][0, -1] / temperature
        if position % 8:
            logits[BANNED] = float("-inf")  # 一句七个字，不许出现换行和标点
        else:
            allowed = logits[PUNCTUATION]  # 第 8、16、24 个字符只能是逗号或句号
            logits[:] = float("-inf")
            logits[PUNCTUATION] = allowed
        if position == 32:
            logits[PUNCTUATION[0]] = float("-inf")  # 全诗的最后只能是句号
        next_id = multinomial(F.softmax(logits, dim=-1), 1)
        ids = torch.cat([ids, next_id[None]], dim=1)
    return decode(ids[0].tolist()).strip()


# 以下只管检查和文件，课文不讲
def load_checkpoint(path):
    """读 train.py 写的检查点，返回 (model, tokenizer)；文件不对时用一句话结束。

    weights_only=True：只读数字和文字，别人给的文件不能借机运行代码。
    """
    again = "请取回课程自带的（git checkout ckpt.pt，或者再解压一次下载的压缩包），或者运行 python train.py 重新训练"
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        chars, config, weights = ckpt["chars"], ckpt["config"], ckpt["model"]
        shapes = {name: w.shape for name, w in weights.items()}
        if len(set(chars)) != config["vocab_size"] or len(config) < 6:
            raise ValueError
    except FileNotFoundError:
        sys.exit(f"找不到 {path}，{again}")
    except Exception as e:  # 坏文件的坏法很多，torch.load 抛出的错误也就各式各样
        sys.exit(f"{path} 不是这一课的检查点，或者没有下载完整（{type(e).__name__}），{again}")
    model = GPT(GPTConfig(**config))
    ours = {name: w.shape for name, w in model.state_dict().items()}
    differ = [name for name in ours | shapes if ours.get(name) != shapes.get(name)]
    if differ:
        sys.exit(f"{path} 里的权重和 gpt.py 里的模型对不上：{'、'.join(differ[:3])}（共 {len(differ)} 处），"
                 "请把 gpt.py 改回去，或者运行 python train.py 重新训练")
    model.load_state_dict(weights)
    return model.eval(), Tokenizer(chars)


def check_constants():
    """常量不合理时用一句话结束：哪个常量，应为什么，得到什么。"""
    for name in ("PROMPTS", "TEMPERATURES", "OPENINGS", "HEADS", "LENGTHS"):
        if not isinstance(globals()[name], (tuple, list)):
            sys.exit(f"{name} 应为元组，只有一项时也要写逗号，如 (1,)，得到 {globals()[name]!r}")
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in HEADS):
        sys.exit(f'HEADS 的每一项应为（开头的字，每句几个字），如 (("春眠", 7),)，得到 {HEADS!r}')
    texts = [("PROMPTS", text, "") for text in PROMPTS] + [("OPENINGS", text, "\n") for text in OPENINGS]
    for name, text, forbidden in texts + [("HEADS", heads, "\n，。") for heads, _ in HEADS]:
        if not isinstance(text, str) or not 1 <= len(text) <= 80 or set(text) & set(forbidden):
            sys.exit(f"{name} 里应为 1 到 80 个字，不能有 {forbidden!r} 里的字符，得到 {text!r}")
        if unknown := tokenizer.explain_unknown(text):
            sys.exit(f"{name} 有误：{unknown}")
    if not isinstance(QUATRAIN, bool):
        sys.exit(f"QUATRAIN 应为 True 或 False，得到 {QUATRAIN!r}")
    try:
        GPTConfig()  # gpt.py 里的尺寸也先检查一遍
        check(0, 2**63 - 1, SEED=SEED)
        check(0, 1, Real, zero=False, TOP_P=1 if TOP_P is None else TOP_P)
        check(1, N_POEMS=N_POEMS, TOP_K=TOP_K)
        check(0, math.inf, Real, FILTER_TEMPERATURE=FILTER_TEMPERATURE)
        for n in LENGTHS:
            check(1, LENGTHS=n)
        for temperature in TEMPERATURES:
            check(0, math.inf, Real, TEMPERATURES=temperature)
        for heads, n_char in HEADS:  # 藏头诗每一步都看全文，全文不能超过 block_size
            check(1, model.config.block_size // len(heads) - 1, **{"HEADS 里每句的字数": n_char})
    except ValueError as e:
        sys.exit(str(e))


def main():
    check_constants()
    probabilities()
    for section in (temperatures, filters, openings, acrostics, kv_cache):
        print()
        section()
    print(end="", flush=True)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # IDLE、Jupyter 的输出没有这个方法，本来就是 UTF-8
            stream.reconfigure(encoding="utf-8")
model, tokenizer = load_checkpoint(Path(__file__).resolve().with_name("ckpt.pt"))
NEWLINE, *PUNCTUATION = tokenizer.encode("\n，。")
BANNED = [NEWLINE, *PUNCTUATION]  # 写一句诗的中间，不许出现换行和标点
if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n已停止。")
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        sys.stdout = None  # 不再打印
        sys.exit("没有打印完：磁盘满了，或者接收输出的程序先结束了")
