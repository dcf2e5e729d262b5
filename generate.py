"""生成文字和 KV 缓存：课文里的六个演示，从上到下，一节一个函数。

一边读课文，一边运行 python generate.py。做练习时改下面的常量，再运行一遍；
python tests/diff.py 会告诉你，改了之后哪几行不一样。
"""
import statistics
import time
from dataclasses import replace
from numbers import Integral
from pathlib import Path

import torch
import torch.nn.functional as F

from gpt import GPT, GPTConfig, check, check_sampling, load_checkpoint, multinomial, start_script

SEED = 36  # 随机种子；课文对第 2 到 5 节的说法全部成立的最小正整数（见 tests/test_claims.py）
PROMPTS = ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风")  # 第 1 节：给哪几段文字猜下一个字
TEMPERATURES = (0.3, 1.0, 1.5)  # 第 2 节：比较哪几个温度，0 表示每次都选概率最高的字
N_POEMS = 3  # 第 2、3 节：每个温度写几首
TOP_K = 20  # 第 3 节：只从概率最高的几个字里选
TOP_P = None  # 练习 1：改成 0.9，第 3 节再用 top-p 写一遍
FILTER_TEMPERATURE = 1.5  # 第 3 节的温度
OPENINGS = ("床前明月光，", "大漠孤烟直，", "人工智能")  # 第 4 节：续写哪几个开头
OPENING_TEMPERATURE = 0.8  # 第 4 节的温度
HEADS = (("春眠不觉", 7), ("学无止境", 5))  # 第 5 节：每句开头的字，和每句几个字
QUATRAIN = False  # 练习 2：改成 True，第 5 节再写三首固定格式的七言绝句
LENGTHS = (32, 64, 120)  # 第 6 节：写多少个字来计时
MAX_CHARS = 80  # 一首诗最多写几个字，写到这里还没有结束就截断
REPEATS = 3  # 第 6 节：每种长度量几次，取中位数

if __name__ == "__main__":
    start_script()
model, tokenizer, _ = load_checkpoint(Path(__file__).resolve().with_name("ckpt.pt"))


def encode(text):
    """文字 -> (1, T) 的编号张量。有词表外的字时抛出 ValueError。"""
    return torch.tensor([tokenizer.encode(text)])


def decode(ids):
    """编号的 list -> 文字。"""
    return tokenizer.decode(ids)


NEWLINE, *PUNCTUATION = tokenizer.encode("\n，。")
BANNED = [NEWLINE, *PUNCTUATION]  # 写一句诗的中间，不许出现换行和标点


def count(n):
    """把个数写成汉字，如 3 -> 三；超过十的用阿拉伯数字。"""
    return "零一两三四五六七八九十"[n] if n <= 10 else str(n)


def write_poem(opening, temperature, top_k=None, top_p=None):
    """从换行符和 opening 开始写一首诗，写到换行为止，返回一行文字。写满 MAX_CHARS 个字还没完，就截断，加上省略号。"""
    ids = encode("\n" + opening)
    ids = model.generate(ids, max(0, MAX_CHARS - len(opening)), temperature, top_k, top_p, stop=NEWLINE)
    text = decode(ids[0].tolist())[1:]
    return text[:-1] if text.endswith("\n") else text + "……"


def probabilities():
    print("== 1. 读完一段文字，模型给下一个字的概率（前 8 名）")
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(encode(prompt)[:, -model.config.block_size:])[0][0, -1]  # (vocab_size,)，最后一个位置的分数
        top = torch.topk(F.softmax(logits, dim=-1), min(8, len(tokenizer)))
        words = (f"{decode([i])} {p:.1%}" for p, i in zip(top.values.tolist(), top.indices.tolist()))
        print(f"  「{prompt}」→ {'  '.join(words)}".replace("\n", "⏎"))


def temperatures():
    print(f"== 2. 同样的随机种子，{count(len(TEMPERATURES))}个温度各写 {N_POEMS} 首")
    for temperature in TEMPERATURES:
        print(f"  温度 {temperature}：")
        torch.manual_seed(SEED)
        for _ in range(N_POEMS):
            print("    " + write_poem("", temperature))


def filters():
    print(f"== 3. 温度 {FILTER_TEMPERATURE}，但只从概率最高的 {TOP_K} 个字里选（top-k={TOP_K}）")
    torch.manual_seed(SEED)
    for _ in range(N_POEMS):
        print("    " + write_poem("", FILTER_TEMPERATURE, top_k=TOP_K))
    if TOP_P is not None:  # 练习 1
        print(f"  温度 {FILTER_TEMPERATURE}，top-p={TOP_P}：")
        torch.manual_seed(SEED)
        for _ in range(N_POEMS):
            print("    " + write_poem("", FILTER_TEMPERATURE, top_p=TOP_P))


def openings():
    print("== 4. 给出开头，让它续写")
    for opening in OPENINGS:
        torch.manual_seed(SEED)
        print("    " + write_poem(opening, OPENING_TEMPERATURE))


@torch.no_grad()
def write_char(ids, banned, temperature):
    """约束解码的一步：把 banned 里的编号的分数设成负无穷，再选一个字接在 ids（1, T）后面，返回 (1, T + 1)。"""
    temperature = max(temperature, 1e-6)  # 0 不能做除数；除以极小的数，差不多总是选分数最高的字
    text, ids = ids, ids[:, -model.config.block_size:]  # 写得太长时，模型只看最后 block_size 个字
    logits = model(ids)[0][0, -1] / temperature
    logits[banned] = float("-inf")  # 藏头诗里就是课文的 logits[BANNED]
    next_id = multinomial(F.softmax(logits, dim=-1), 1)
    return torch.cat([text, next_id[None]], dim=1)


def acrostic(heads, n_char=7, temperature=0.8):
    """藏头诗：heads 里的字依次做每句的开头，每句 n_char 个字。返回一行文字；heads 里有标点、生字或为空时抛出 ValueError。"""
    check_heads(heads, n_char)
    ids = encode("\n")
    for i, head in enumerate(heads):
        ids = torch.cat([ids, encode(head)], dim=1)  # 先把指定的字放进去
        for _ in range(n_char - 1):  # 再让模型一个字一个字地写完这一句
            ids = write_char(ids, BANNED, temperature)
        ids = torch.cat([ids, encode("，。"[i % 2])], dim=1)  # 标点由我们加，保证格式
    return decode(ids[0].tolist()).strip()


def quatrain(temperature=0.8):
    """练习 2：七言绝句，第 8、16、24 个字符只能是逗号或句号，第 32 个只能是句号，其他位置不许有标点。返回一行文字。"""
    ids = encode("\n")
    for position in range(1, 33):
        if position % 8:
            banned = BANNED
        else:
            allowed = PUNCTUATION if position < 32 else PUNCTUATION[1:]
            banned = [i for i in range(len(tokenizer)) if i not in allowed]
        ids = write_char(ids, banned, temperature)
    return decode(ids[0].tolist()).strip()


def acrostics():
    print("== 5. 藏头诗：每句开头的字由我们指定，其余由模型写")
    for heads, n_char in HEADS:
        torch.manual_seed(SEED)
        print("    " + acrostic(heads, n_char))
    if QUATRAIN:  # 练习 2
        print("  七言绝句（固定格式）：")
        torch.manual_seed(SEED)
        for _ in range(3):
            print("    " + quatrain())


def timed(gpt, n, use_cache):
    """从换行符开始写 n 个字，返回 (文字的编号, 用了几毫秒)。"""
    torch.manual_seed(SEED)
    began = time.perf_counter()
    ids = gpt.generate(encode("\n"), n, use_cache=use_cache)
    return ids[0, 1:].tolist(), (time.perf_counter() - began) * 1000


def size(n_bytes):
    """字节数写成 KB 或 MB。"""
    return f"{n_bytes / 1024:g} KB" if n_bytes < 1024**2 else f"{n_bytes / 1024**2:g} MB"


def kv_cache():
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    if not LENGTHS:
        return
    gpt, config = model, GPTConfig(vocab_size=len(tokenizer))
    if replace(config, dropout=model.config.dropout) != model.config:  # 练习 3：改了尺寸，还没有重新训练
        print(f"  gpt.py 的尺寸和 ckpt.pt 的不同（block_size {config.block_size}），这一节用随机初始化的模型来量")
        torch.manual_seed(SEED)
        gpt = GPT(config)
    longest, block_size = max(LENGTHS), config.block_size
    (plain, _), (cached, _) = timed(gpt, longest, False), timed(gpt, longest, True)  # 也算预热
    differ = next((i for i in range(longest) if plain[i] != cached[i]), None)
    verdict = "完全一样" if differ is None else f"不一样，从第 {differ + 1} 个字开始"
    print(f"  同样的随机种子，写 {longest} 个字：用缓存和不用缓存的结果{verdict}")
    for n in LENGTHS:
        pairs = [(timed(gpt, n, False)[1], timed(gpt, n, True)[1]) for _ in range(REPEATS)]  # 交替着量
        slow, fast = (statistics.median(column) for column in zip(*pairs))
        print(f"  写 {n:>3} 个字：不用缓存 {slow:>6.0f} 毫秒，用缓存 {fast:>5.0f} 毫秒，快了 {slow / fast:.1f} 倍")
    if longest > block_size:
        print(f"  超过 block_size（{block_size}）之后窗口往后滑，每个字的位置都变了，缓存只能作废，省不了计算")
    caches = [{} for _ in gpt.blocks]
    with torch.no_grad():
        gpt(torch.full((1, block_size), NEWLINE), caches=caches)
    tensors = [tensor for cache in caches for tensor in cache.values()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # 真正占用的字节数
    print(f"  这个模型每个词元的缓存：2 × {config.n_layer} 层 × {config.n_embd} 维 × {tensors[0].element_size()} 字节"
          f" = {size(held / block_size)}，{block_size} 个词元共 {size(held)}")


def check_heads(heads, n_char):
    """检查藏头诗的参数，不合理时抛出 ValueError。"""
    check("藏头诗每句的字数", n_char, Integral, lambda n: n >= 1, "不小于 1 的整数")
    check("藏头诗的开头", heads, str, lambda h: h and not set(h) & set("\n，。"), "至少一个字的字符串，不能有标点和换行")
    encode(heads)


def check_constants():
    """常量不合理时抛出 ValueError，说明是哪个常量、应为什么。"""
    GPTConfig()  # gpt.py 里的尺寸也先检查一遍
    check("SEED", SEED, Integral, lambda n: 0 <= n < 2**63, "不小于 0 的整数")
    for name, value in (("PROMPTS", PROMPTS), ("TEMPERATURES", TEMPERATURES), ("OPENINGS", OPENINGS), ("HEADS", HEADS),
                        ("LENGTHS", LENGTHS)):
        check(name, value, (tuple, list), lambda v: True, "元组，只有一项时也要写逗号，如 (1,)")
    for name, value in (("N_POEMS", N_POEMS), ("TOP_K", TOP_K), ("MAX_CHARS", MAX_CHARS), ("REPEATS", REPEATS),
                        *(("LENGTHS 里的字数", n) for n in LENGTHS)):
        check(name, value, Integral, lambda n: n >= 1, "不小于 1 的整数")
    for name, value in (("FILTER_TEMPERATURE", FILTER_TEMPERATURE), ("OPENING_TEMPERATURE", OPENING_TEMPERATURE),
                        *(("TEMPERATURES 里的温度", t) for t in TEMPERATURES)):
        check_sampling(value, TOP_K, TOP_P, names=(name, "TOP_K", "TOP_P"))
    check("QUATRAIN", QUATRAIN, bool, lambda q: True, " True 或 False")
    for name, texts in (("PROMPTS", PROMPTS), ("OPENINGS", OPENINGS), ("HEADS", HEADS)):
        for text in texts:
            try:
                if name == "HEADS":
                    check("每一项", text, (tuple, list), lambda t: len(t) == 2, "一对（开头的字，每句几个字），如 (\"春眠不觉\", 7)")
                    check_heads(*text)
                else:
                    check("每一项", text, str, lambda t: t and (name == "PROMPTS" or "\n" not in t),
                          "至少一个字的字符串" + ("，不能有换行" if name == "OPENINGS" else ""))
                    encode(text)
            except ValueError as e:
                raise ValueError(f"{name} 有误：{e}") from None


def main():
    check_constants()
    for i, section in enumerate((probabilities, temperatures, filters, openings, acrostics, kv_cache)):
        if i > 0:
            print()
        section()


if __name__ == "__main__":
    main()
