"""生成文字和 KV 缓存：课文里的六个演示，从上到下，一节一个函数。

一边读课文，一边运行 python generate.py。做练习时改下面的常量，再运行一遍；
python tests/diff.py 会告诉你，改了之后哪几行不一样。
练习 2 写在「练习 2 的答案」那一行的下面。
"""
import errno
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from gpt import GPT, BadValue, GPTConfig, check, is_integer, is_number, multinomial
from tokenizer import Tokenizer

# 从 0 试起，第一个让第 2 到 4 节的诗符合课文说法的随机种子（tests/claims.py）
SEED = 2725
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

# 模型太小，几个线程只会互相等；机器一忙，第 6 节的快慢甚至会颠倒
torch.set_num_threads(1)
# oneDNN 每次计算前都要准备一番，写一个字的计算还没有准备花的时间多：关掉它快一成，结果一样
torch.backends.mkldnn.enabled = False


# 下面用到的 model（模型）、tokenizer（分词器）、NEWLINE 和 BANNED（换行和标点的编号），
# 都在文件末尾从 ckpt.pt 读入
def encode(text):
    """文字 -> (1, T) 的编号张量。有词表外的字时抛出 ValueError。"""
    return torch.tensor([tokenizer.encode(text)])


def decode(ids):
    """编号的 list -> 文字。"""
    return tokenizer.decode(ids)


def write_poem(opening="", temperature=0.8, top_k=None, top_p=None):
    """从换行符和 opening 写到换行为止，返回一行文字；写满 80 个字还没完就截断，加上省略号。"""
    ids = encode("\n" + opening)
    n = 80 - len(opening)
    ids = model.generate(ids, n, temperature, top_k, top_p, stop=NEWLINE)
    text = decode(ids[0].tolist())[1:]  # 去掉最前面的换行符
    if text.endswith("\n"):
        return text[:-1]
    return text + "……"


def show(n, write, *args):
    """重新设定随机种子，打印 write(*args) 写的 n 首诗。"""
    torch.manual_seed(SEED)
    for _ in range(n):
        print("    " + write(*args))


def probabilities():
    """原诗的「流」和「霜」都不在前 8 名里；「春风」后面是句号的概率，和它在语料里的比例差不多。"""
    print("== 1. 读完一段文字，模型给下一个字的概率（前 8 名）")
    for prompt in PROMPTS:
        idx = encode(prompt)  # (1, T)
        with torch.no_grad():
            logits, _ = model(idx)  # (1, T, vocab_size)，每个位置都给词表里的字打了分
        last = logits[0, -1]  # (vocab_size,)，下一个字只看最后一个位置
        probs = F.softmax(last, dim=-1)
        top = torch.topk(probs, 8)
        chars = decode(top.indices.tolist())
        line = "  ".join(f"{ch} {p:.1%}" for ch, p in zip(chars, top.values.tolist()))
        print(f"  「{prompt}」→ {line}".replace("\n", "⏎"))  # 换行符看不见，印成 ⏎


def temperatures():
    """温度 0.3 最通顺，可是用字常见，重复也多；1.0 用字丰富了，也有了生僻字；1.5 连格式也崩了。"""
    print(f"== 2. 同样的随机种子，{in_words(len(TEMPERATURES))}个温度各写 {N_POEMS} 首")
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
# 和课文一字不差，只有 torch.multinomial 换成了 gpt.py 的 multinomial：在哪台机器上都抽出同样的字
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


def time_generate(net, n, use_cache):
    """从换行符开始写 n 个字，返回 (写出来的编号, 用了几毫秒)。"""
    torch.manual_seed(SEED)
    began = time.perf_counter()
    ids = net.generate(encode("\n"), n, use_cache=use_cache)
    return ids[0, 1:].tolist(), (time.perf_counter() - began) * 1000


def kv_cache():
    """先看结果：一字不差。再看时间：写的字越多，省下的越多。最后看代价：每个词元占多少内存。"""
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    if not LENGTHS:
        return
    net = choose_model()
    config = net.config
    longest = max(LENGTHS)
    if longest > 200:
        print(f"  要写 {longest} 个字，不用缓存的要算很久，请等半分钟左右……", flush=True)

    plain, _ = time_generate(net, longest, use_cache=False)  # 顺便预热：第一次运行总要慢一些
    cached, _ = time_generate(net, longest, use_cache=True)
    print(f"  同样的随机种子，写 {longest} 个字：用缓存和不用缓存的结果{compare(plain, cached)}")

    for n in LENGTHS:
        without, with_cache = [], []
        for _ in range(3):  # 交替着量，机器忽快忽慢时对两边都公平
            without.append(time_generate(net, n, use_cache=False)[1])
            with_cache.append(time_generate(net, n, use_cache=True)[1])
        slow = statistics.median(without)
        fast = statistics.median(with_cache)
        print(f"  写 {n:>3} 个字：不用缓存 {slow:>6.0f} 毫秒，用缓存 {fast:>5.0f} 毫秒，"
              f"快了 {slow / fast:.1f} 倍")
    if longest > config.block_size:
        print(f"  超过 block_size（{config.block_size}）之后窗口往后滑，每个字的位置都变了，"
              "缓存只能作废，省不了计算")

    caches = [{} for _ in net.blocks]
    with torch.no_grad():  # 装满缓存：随便什么字都行，只看缓存占多少
        net(torch.full((1, config.block_size), NEWLINE), caches=caches)
    n_bytes = sum(kv.nbytes for cache in caches for kv in cache.values())
    print(f"  这个模型每个词元的缓存：2 × {config.n_layer} 层 × {config.n_embd} 维"
          f" × {caches[0]['k'].itemsize} 字节 = {n_bytes / config.block_size / 1024:g} KB，"
          f"{config.block_size} 个词元共 {n_bytes / 1024:g} KB")


# 练习 2 的答案：先自己写，再往下看
@torch.no_grad()
def quatrain(temperature=0.8):
    """七言绝句：一句写七个字，不许出现换行和标点；第八个字符只许是标点。返回一行文字。"""
    ids = encode("\n")
    for i in range(4):
        for _ in range(7):  # 和 acrostic 一样，只是开头的字也由模型写
            logits = model(ids)[0][0, -1] / temperature
            logits[BANNED] = float("-inf")
            next_id = multinomial(F.softmax(logits, dim=-1), 1)
            ids = torch.cat([ids, next_id[None]], dim=1)
        allowed = PUNCTUATION if i < 3 else PUNCTUATION[1:]  # 逗号或句号；全诗的最后只能是句号
        logits = model(ids)[0][0, -1] / temperature
        marks = logits[allowed]  # 先记下标点的分数，再把所有的字都去掉，标点放回来
        logits[:] = float("-inf")
        logits[allowed] = marks
        next_id = multinomial(F.softmax(logits, dim=-1), 1)
        ids = torch.cat([ids, next_id[None]], dim=1)
    return decode(ids[0].tolist()).strip()


# 以下只管检查和文件，课文不讲
def in_words(n):
    """个数写成汉字：3 是「三」，2 是「两」；超过十的照写数字。"""
    return "零一两三四五六七八九十"[n] if n <= 10 else str(n)


def compare(plain, cached):
    """两段编号一样吗？写成半句话。"""
    for i, (a, b) in enumerate(zip(plain, cached), 1):
        if a != b:
            return f"不一样，从第 {i} 个字开始"
    return "完全一样"


def choose_model():
    """第 6 节量哪个模型：gpt.py 的尺寸和 ckpt.pt 的一样，就量 ckpt.pt 的。

    不一样（练习 3：改了尺寸，还没有重新训练），就说出哪里不一样，量一个随机初始化的。
    """
    ours = asdict(GPTConfig(vocab_size=len(tokenizer)))
    trained = asdict(model.config)
    changed = [f"{name} 是 {ours[name]}，ckpt.pt 的是 {trained[name]}"
               for name in ours if ours[name] != trained[name] and name != "dropout"]
    if not changed:
        return model
    print(f"  gpt.py 的 {'；'.join(changed)}：这一节用随机初始化的模型来量")
    return GPT(GPTConfig(**ours))


def load_checkpoint(path):
    """读 train.py 写的检查点，返回 (model, tokenizer)；文件不对时用一句话结束。

    weights_only=True：只读数字和文字，别人给的文件不能借机运行代码。
    """
    way_out = ("请取回课程自带的（git checkout ckpt.pt，或者再解压一次下载的压缩包），"
               "或者运行 python train.py 重新训练")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        chars, config, weights = ckpt["chars"], ckpt["config"], ckpt["model"]
        shapes = {name: tuple(w.shape) for name, w in weights.items()}
        missing = {"block_size", "n_layer", "n_head", "n_embd", "dropout"} - config.keys()
        unknown = [name for name in config if not hasattr(GPTConfig, name)]
        vocabulary = set(chars)
        if len(vocabulary) != config["vocab_size"] or set("\n，。") - vocabulary:
            raise ValueError("词表不对")
        if missing or unknown:
            raise ValueError("尺寸不对")
    except FileNotFoundError:
        stop(f"找不到 {path}，{way_out}")
    except Exception as e:  # 坏文件的坏法很多，torch.load 抛出的错误也就各式各样
        stop(f"{path} 不是这一课的检查点，或者没有下载完整（{type(e).__name__}），{way_out}")

    try:
        config = GPTConfig(**config)
    except BadValue as e:
        stop(f"{path} 不是这一课的检查点（{e}），{way_out}")
    model = GPT(config)
    ours = {name: tuple(w.shape) for name, w in model.state_dict().items()}
    if not ours.keys() & shapes.keys():
        stop(f"{path} 不是这一课的检查点（权重的名字没有一个和模型的相同），{way_out}")
    differ = [name for name in ours | shapes if ours.get(name) != shapes.get(name)]
    if differ:
        name = differ[0]
        stop(f"{path} 里的权重和 gpt.py 里的模型对不上：{name} 在文件里是 {shapes.get(name)}，"
             f"在模型里是 {ours.get(name)}（共 {len(differ)} 处）。"
             f"改过 gpt.py，就改回去；没有改过，{way_out}")
    model.load_state_dict(weights)
    return model.eval(), Tokenizer(chars)


def check_text(name, text, most, forbidden=""):
    """检查常量里的一段文字：1 到 most 个字，不含 forbidden 里的字符，都在词表里。"""
    check(isinstance(text, str) and 1 <= len(text) <= most,
          f"{name} 的每一段", text, f" 1 到 {most} 个字的文字")
    check(not set(text) & set(forbidden), f"{name} 的每一段", text,
          "没有换行的文字" if forbidden == "\n" else "没有换行和标点的文字")
    if unknown := tokenizer.explain_unknown(text):
        raise BadValue(f"{name} 有误：{unknown}")


def check_temperature(name, value):
    """检查一个温度。"""
    check(is_number(value) and value >= 0, name, value, "不小于 0 的数，最大 1e300")


def check_constants():
    """检查文件开头的常量，和 gpt.py 里的尺寸；不合理时抛出 BadValue。"""
    block_size = model.config.block_size
    GPTConfig()
    for name, value in (("PROMPTS", PROMPTS), ("TEMPERATURES", TEMPERATURES),
                        ("OPENINGS", OPENINGS), ("HEADS", HEADS), ("LENGTHS", LENGTHS)):
        check(isinstance(value, (tuple, list)),
              name, value, "元组，只有一项时也要写逗号，如 (1,)")
    check(is_integer(SEED) and 0 <= SEED < 2**63, "SEED", SEED, f" 0 到 {2**63 - 1} 的整数")
    for prompt in PROMPTS:
        check_text("PROMPTS", prompt, min(80, block_size))
    for temperature in TEMPERATURES:
        check_temperature("TEMPERATURES 里的温度", temperature)
    check(is_integer(N_POEMS) and N_POEMS >= 1, "N_POEMS", N_POEMS, "不小于 1 的整数")
    check(is_integer(TOP_K) and TOP_K >= 1, "TOP_K", TOP_K, "不小于 1 的整数")
    if TOP_P is not None:
        check(is_number(TOP_P) and 0 < TOP_P <= 1,
              "TOP_P", TOP_P, " 0 到 1 的数（不含 0），或者 None")
    check_temperature("FILTER_TEMPERATURE", FILTER_TEMPERATURE)
    for opening in OPENINGS:
        check_text("OPENINGS", opening, 80, forbidden="\n")
    for pair in HEADS:
        check(isinstance(pair, (tuple, list)) and len(pair) == 2,
              "HEADS 的每一项", pair, '（开头的字，每句几个字），如 ("春眠不觉", 7)')
        heads, n_char = pair
        check_text("HEADS", heads, 80, forbidden="\n，。")
        check(is_integer(n_char) and n_char >= 1, "HEADS 里每句的字数", n_char, "不小于 1 的整数")
        length = len(heads) * (n_char + 1)
        check(length <= block_size, f"HEADS 里的 {pair!r} 连标点的总字数", length,
              f"不超过 block_size（{block_size}）的数")
    check(isinstance(QUATRAIN, bool), "QUATRAIN", QUATRAIN, " True 或 False")
    if QUATRAIN:
        check(block_size >= 33, "QUATRAIN 是 True 时，ckpt.pt 的 block_size", block_size,
              "不小于 33 的整数")
    for n in LENGTHS:
        check(is_integer(n) and n >= 1, "LENGTHS 里的字数", n, "不小于 1 的整数")


def use_utf8():
    """标准输出和标准错误都用 UTF-8；IDLE、Jupyter 的输出没有 reconfigure，本来就是 UTF-8。"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")


def stop(sentence):
    """用一句话结束，退出码是 1。"""
    use_utf8()
    sys.exit(sentence)


def main():
    try:
        check_constants()
    except BadValue as e:
        stop(str(e))
    probabilities()
    for section in (temperatures, filters, openings, acrostics, kv_cache):
        print()
        section()
    print(end="", flush=True)  # 磁盘满了，这里就知道，不等到 Python 退出的时候


model, tokenizer = load_checkpoint(Path(__file__).resolve().with_name("ckpt.pt"))
NEWLINE, *PUNCTUATION = tokenizer.encode("\n，。")
BANNED = [NEWLINE, *PUNCTUATION]  # 写一句诗的中间，不许出现换行和标点

if __name__ == "__main__":
    use_utf8()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n已停止。")
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE, errno.EINVAL):  # Windows 上管道断了是 EINVAL
            raise
        sys.stdout = None  # 不再打印
        sys.exit("没有打印完：磁盘满了，或者接收输出的程序先结束了")
