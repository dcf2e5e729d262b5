"""练习 1、2 写得对不对：python -m pytest tests/test_exercises.py

光看屏幕看不出来：少留一个字的 top-p，只禁止标点的绝句，印出来的诗可能一字不差。这里从任何写法都有的门进去看：
gpt.sample 会抽到哪些字，generate.quatrain() 写出什么。不对时用一句话说：给了什么，得到什么，应该是什么，缺了哪一步。
"""
import ast
import copy
import inspect
import itertools
import math
import random
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch

import generate
import gpt

# 练习 1：(各个字的概率, p, 应该留下哪几个字)。都避开了正好加到 p 的地方，那里多一个少一个只是舍入
TABLES = [
    ((0.5, 0.41, 0.09), 0.9, {0, 1}), ((0.6, 0.4), 0.5, {0}), ((0.09, 0.5, 0.41), 0.9, {1, 2}),
    ((0.12, 0.2, 0.3, 0.38), 0.65, {2, 3}), ((0.05, 0.16, 0.1, 0.55, 0.14), 0.8, {1, 3, 4}),
    ((0.2, 0.3, 0.5), 0.05, {2}), ((0.35, 0.4, 0.05, 0.2), 0.99, {0, 1, 2, 3}), ((0.09, 0.31, 0.15, 0.25, 0.2), 0.5, {1, 3}),
    ((0.09, 0.7, 0.21), 0.6, {1}),
    ((0.3, 0.02, 0.68), 0.97, {0, 2})]
NAMES = "甲乙丙丁戊己庚辛"


def add_up(values, p):
    """values 里从前往后加，到够 p 为止，要几个。"""
    total = 0.0
    for n, value in enumerate(values, 1):
        total += value
        if total >= p:
            return n
    return len(values)


def by_rank(probs, n):
    """概率最高的 n 个字。"""
    return set(sorted(range(len(probs)), key=lambda i: -probs[i])[:n])


def n_right(probs, p):
    return add_up(sorted(probs, reverse=True), p)


# 常见的错误：(照这样写会留下哪几个字, 缺了哪一步)。得到的和哪一种处处一样，就说缺了哪一步
MISTAKES = [
    (lambda probs, p: set(range(len(probs))), "什么也没有去掉：去掉的字，分数要设成负无穷 float(\"-inf\")，再 return 出来"),
    (lambda probs, p: by_rank(probs, n_right(probs, p) - 1), "跨过 p 的那个字也要留下：加上它，才够 p"),
    (lambda probs, p: by_rank(probs, max(1, n_right(probs, p) - 1)), "跨过 p 的那个字也要留下：加上它，才够 p"),
    (lambda probs, p: by_rank(probs, n_right(probs, p) + 1), "多留了一个字：加到够 p，就停下来"),
    (lambda probs, p: set(range(add_up(probs, p))), "先排序再累加：从概率最高的字加起，不是从编号最小的"),
    (lambda probs, p: set(range(add_up(probs, p) - 1)), "先排序再累加：从概率最高的字加起，不是从编号最小的"),
    (lambda probs, p: set(range(n_right(probs, p))), "排好以后放回原来的位置：第几名不是第几个字"),
    (lambda probs, p: set(range(n_right(probs, p) - 1)), "排好以后放回原来的位置：第几名不是第几个字"),
    (lambda probs, p: by_rank(probs, 1), "先 softmax 再累加：加的是概率，不是分数"),
    (lambda probs, p: {i for i, q in enumerate(probs) if q >= p}, "要看的是累计概率，不是单个字的概率"),
    (lambda probs, p: {i for i, q in enumerate(probs) if q <= p}, "要看的是累计概率，不是单个字的概率"),
    (lambda probs, p: {i for i, q in enumerate(probs) if q >= 1 - p}, "要看的是累计概率，不是单个字的概率"),
    (lambda probs, p: by_rank(probs, max(1, int(p * len(probs)))), "留几个字不能先定：要看加到第几个才够 p"),
    (lambda probs, p: by_rank(probs, n_right(probs, 1 - p)), "要加到 p，不是加到 1 - p"),
    (lambda probs, p: by_rank(probs, n_right(probs, 0.9)), "加到参数 top_p 为止，不能写死成 0.9"),
    (lambda probs, p: set(range(len(probs))) - by_rank(probs, len(probs) - add_up(sorted(probs), p)),
     "排序的方向反了：从概率最高的字加起（descending=True）"),
    (lambda probs, p: set(range(len(probs))) - by_rank(probs, n_right(probs, p)), "留反了：该留下的去掉了，该去掉的留下了")]
GENERAL = "先 softmax；先排序再累加，从概率最高的加起；跨过 p 的那个字也要留下；排好以后放回原来的位置"


def where(error):
    """出了错的一行，和错误本身。"""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == Path(gpt.__file__).parent]
    place = f"{Path(frames[-1].filename).name} 第 {frames[-1].lineno} 行出了错，" if frames else ""
    return f"{place}{type(error).__name__}: {error}"


def doubled(source, name):
    """同一个名字写了两个函数时的一句话；Python 用靠后的那个，另一个白写了。"""
    lines = [node.lineno for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(lines) < 2:
        return ""
    return (f"文件里有 {len(lines)} 个 {name}（第 {'、'.join(map(str, lines))} 行），应该只有一个："
            f"Python 用的是靠后的那个，请在「答案」那一行下面的 {name} 里写，别的删掉")


def draw(sample, probs, p, n, shift=2.0):
    """照这些概率抽 n 次，返回 {第几个字: 几次}，或者出的错。分数都加上 shift：概率不变。"""
    logits = torch.tensor(probs).log()[None, None] + shift
    torch.manual_seed(0)
    try:
        return Counter(sample(logits.clone(), 1.0, top_p=p).item() for _ in range(n))
    except Exception as e:
        return e


def drawn(result):
    """draw 的结果写成半句话。"""
    if isinstance(result, Exception):
        return where(result)
    return "抽到过 " + "、".join(NAMES[i] for i in sorted(result))


def judge_top_p(sample):
    """练习 1 的答案对不对：对时返回空字符串，不对时返回一句话。sample：gpt.sample。"""
    found = []  # (概率, p, 应该留下的, 抽到的字，或者错误)
    for probs, p, expected in TABLES:
        result = draw(sample, probs, p, 250)
        got = result if isinstance(result, Exception) else set(result)
        found.append((probs, p, expected, got))
    wrong = [row for row in found if row[3] != row[2]]
    if wrong:
        thoughts = [thought for mistake, thought in MISTAKES
                    if all(mistake(probs, p) == got or not mistake(probs, p) and isinstance(got, Exception)
                           for probs, p, _, got in found)]
        if "NoneType" in str(wrong[0][3]):
            thoughts = ["最后要 return 改好的分数：没有 return 的函数，返回的是 None"]
        probs, p, expected, got = next((row for row in wrong if not isinstance(row[3], Exception)), wrong[0])
        given = "、".join(f"{NAMES[i]} {q:g}" for i, q in enumerate(probs))
        right = "、".join(NAMES[i] for i in sorted(expected))
        return (f"top-p 还不对：概率是 {given}，p={p}，{drawn(got)}，应该只抽得到 {right}。"
                f"缺的一步：{(thoughts or [GENERAL])[0]}")

    counts = draw(sample, (0.2, 0.7, 0.1), 0.85, 1500)
    if isinstance(counts, Exception) or abs(counts[1] / 1500 - 7 / 9) > 0.08:
        got = where(counts) if isinstance(counts, Exception) else f"乙抽到 {counts[1]} 次"
        return (f"top-p 还不对：概率是 甲 0.2、乙 0.7、丙 0.1，p=0.85，抽 1500 次，{got}，应该在 1167 次上下。"
                "缺的一步：留下的字，分数照原样，概率之间的比例才不变")
    low = draw(sample, (0.5, 0.41, 0.09), 0.9, 250, shift=-40.0)
    if isinstance(low, Exception) or set(low) != {0, 1}:
        return (f"top-p 还不对：概率是 甲 0.5、乙 0.41、丙 0.09，可是分数都减了 40，p=0.9，{drawn(low)}，"
                "应该只抽得到 甲、乙。缺的一步：去掉的字，分数要设成负无穷 float(\"-inf\")，才一定抽不到")
    weights = [200 - i for i in range(200)]
    random.Random(0).shuffle(weights)
    probs = [weight / sum(weights) for weight in weights]
    n = n_right(probs, 0.9)
    many = draw(sample, probs, 0.9, 3000)
    if isinstance(many, Exception) or not set(many) <= by_rank(probs, n + 1) or len(many) < 0.85 * n:
        got = where(many) if isinstance(many, Exception) else f"抽到过 {len(many)} 个字"
        return (f"top-p 还不对：200 个字，概率和 1、2、3……200 成正比，p=0.9，{got}，"
                f"应该是概率最高的 {n} 个。缺的一步：留几个字不能先定，要看加到第几个才够 p")
    free = draw(sample, (0.2, 0.3, 0.5), None, 250)
    if isinstance(free, Exception) or set(free) != {0, 1, 2}:
        return (f"top-p 还不对：top_p=None 时，{drawn(free)}，应该什么也不去掉。"
                "缺的一步：先看 if top_p is not None")
    return ""


class TooLong(Exception):
    """写了这么多步还没有写完；不拦住，写完再挑的写法会一直写下去。"""


def stand_in(model, change):
    """model 的替身：分数先经过 change(logits, start) 再给出来；start：第一个位置是第几个。"""
    steps = itertools.count(1)

    def hook(module, args, kwargs, output):
        if next(steps) > 500:
            raise TooLong("写了 500 步还没有写完")
        start = kwargs.get("start", args[3] if len(args) > 3 else 0)
        return change(output[0], start), output[1]
    other = copy.deepcopy(model)
    other.register_forward_hook(hook, with_kwargs=True)
    return other


def prefer(model, ids, amount):
    """替身：特别想写（amount 是负数时特别不想写）编号在 ids 里的字。"""
    bias = torch.zeros(model.config.vocab_size)
    bias[ids] = amount
    return stand_in(model, lambda logits, start: logits + bias)


def recite(model, ids):
    """替身：一心要写 ids 这一串编号。"""
    def change(logits, start):
        logits = logits.clone()
        for t in range(logits.size(1)):
            logits[:, t, ids[min(start + t, len(ids) - 1)]] += 60.0
        return logits
    return stand_in(model, change)


def write_quatrain(module, model, seed=0):
    """用 model 写一首，返回 (quatrain() 返回的, 它出的错)。"""
    real, module.model = module.model, model
    torch.manual_seed(seed)
    try:
        return module.quatrain(), None
    except Exception as e:
        return None, e
    finally:
        module.model = real


def find_fault(text, last):
    """text 哪里不合格式：(半句话, 缺了哪一步)；都合时是空的。last：第 32 个字符可以是什么。"""
    for position, ch in enumerate(text[:32], 1):
        shown = "换行符" if ch == "\n" else f"「{ch}」"
        if position == 32 and ch not in last:
            return f"第 32 个字符是{shown}，应该是句号，或者没有", COUNT
        if position in (8, 16, 24) and ch not in "，。":
            return f"第 {position} 个字符是{shown}，应该是逗号或句号", COUNT if ch == "\n" else FORCE
        if position % 8 and ch in "\n，。":
            return f"第 {position} 个字符是{shown}，应该是汉字", BAN_NEWLINE if ch == "\n" else BAN_MARKS
    if len(text) not in (31, 32):
        return f"一共 {len(text)} 个字符，应该是 31 个，或者加上最后的句号 32 个", COUNT
    return ()


# 练习 2 缺了哪一步
BAN_NEWLINE = "写字的位置也不许换行：换行符的分数也要设成负无穷（它也在 BANNED 里）"
BAN_MARKS = "写字的位置不许出现标点：BANNED 里的字的分数都要设成负无穷，每一步都要"
FORCE = "只禁止还不够：到第 8、16、24 个字符时，要把逗号和句号以外的字都设成负无穷"
COUNT = "数一数已经写了几个字符：第 8、16、24 个只许是逗号或句号，其他位置不许出现换行和标点"


def judge_quatrain(module):
    """练习 2 的答案对不对：对时返回空字符串，不对时返回一句话。module：generate。"""
    if not callable(getattr(module, "quatrain", None)):
        return "generate.py 里没有 quatrain 这个函数，应该有：quatrain() 返回一首七言绝句"
    model, banned = module.model, module.BANNED
    newline, comma, stop = (module.tokenizer.ids[ch] for ch in "\n，。")
    cases = [(" ckpt.pt 里的模型", model, seed, "。") for seed in range(3)]
    cases += [("一个哪里都不想写标点的模型", prefer(model, banned, -60.0), 0, "，。"),
              ("一个最想写换行符的模型", prefer(model, [newline], 60.0), 0, "，。"),
              ("一个最想写逗号的模型", prefer(model, [comma], 60.0), 0, "，。"),
              ("一个最想写句号的模型", prefer(model, [stop], 60.0), 0, "，。")]
    for who, other, seed, last in cases:
        text, error = write_quatrain(module, other, seed)
        if isinstance(error, TooLong):
            return (f"quatrain 还不对：用{who}，{error}，应该写 31 或 32 步。"
                    "缺的一步：不是写完再挑，是每一步都把不合格式的字的分数设成负无穷")
        if error:
            return f"quatrain 还不对：用{who}，{where(error)}；应该返回一首七言绝句。缺的一步：{COUNT}"
        if not isinstance(text, str):
            return (f"quatrain 还不对：它返回了 {text!r}，应该返回一行文字。"
                    "缺的一步：最后 return decode(ids[0].tolist()).strip()")
        if fault := find_fault(text.removeprefix("\n").removesuffix("\n"), last):
            what, thought = fault
            return f"quatrain 还不对：用{who}，写出来的是 {text!r}，{what}。缺的一步：{thought}"
    poem = make_poem(module)
    text, error = write_quatrain(module, recite(model, module.tokenizer.encode(poem + "\n")))
    got = (text or "").strip()
    if error or [ch for i, ch in enumerate(got, 1) if i % 8] != [ch for i, ch in enumerate(poem, 1) if i % 8]:
        return (f"quatrain 还不对：用一个一心要写 {poem!r} 的模型，{where(error) if error else f'写出来的是 {got!r}'}，"
                "应该就是这些字。缺的一步：每一步都把前面写好的字全送进模型，照它给的概率选字，再接到后面")
    return ""


def make_poem(module):
    """用词表里的字拼一首七言绝句，只有格式，没有意思。"""
    chars = random.Random(0).sample([ch for ch in module.tokenizer.chars if ch not in "\n，。"], 28)
    return "".join("".join(chars[i * 7:i * 7 + 7]) + "，。，。"[i] for i in range(4))


def test_top_p():
    sentence = doubled(inspect.getsource(gpt), "keep_top_p") or judge_top_p(gpt.sample)
    if sentence:
        pytest.fail(sentence, pytrace=False)


def test_quatrain():
    sentence = doubled(inspect.getsource(generate), "quatrain") or judge_quatrain(generate)
    if sentence:
        pytest.fail(sentence, pytrace=False)


def test_the_judge_s_own_tables_are_right():
    """每张表：留下的够 p，少一个就不够，而且不在正好加到 p 的地方。"""
    for probs, p, expected in TABLES:
        kept = sum(probs[i] for i in expected)
        assert expected == by_rank(probs, n_right(probs, p)) and math.isclose(sum(probs), 1)
        assert kept - min(probs[i] for i in expected) < p - 1e-3 and kept > p + 1e-3
