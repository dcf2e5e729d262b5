"""训练：用 data/poems.txt 里的唐诗训练 gpt.py 里的模型，写出 ckpt.pt。

python train.py 要几分钟到半小时。随时可以按 Ctrl-C 停下，原来的 ckpt.pt 不会动；
把 RESUME 改成 True 再运行，就从上一次存档接着训练。改模型的尺寸，请改 gpt.py 里的 GPTConfig。
"""
import ctypes
import errno
import hashlib
import io
import os
import random
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gpt import GPT, BadValue, GPTConfig, check, is_integer, is_number
from tokenizer import Tokenizer

SEED = 6  # 随机种子：从 1 试起，第一个让模型符合课文说法的
MAX_STEPS = 3550  # 一共训练多少步：从 3,200 步起每隔 50 步试一个，这个种子最早符合的
EVAL_EVERY = 500  # 每隔多少步评估一次，并且存档
BATCH_SIZE = 10  # 每一步看多少段文字，每段 block_size 个字
LEARNING_RATE = 2e-3  # 最高的学习率
WARMUP_STEPS = 200  # 学习率先用这么多步升到最高
DECAY_STEPS = 600  # 最后用这么多步降到 0
WEIGHT_DECAY = 0.1  # 权重衰减，只用在矩阵上
RESUME = False  # True：从上一次存档接着训练
VAL_FRACTION = 0.05  # 留作验证的诗占多少
SPLIT_SEED = 1  # 挑选验证集用的随机种子
HELD_OUT = ("黄河入海流", "疑是地上霜", "大漠孤烟直")  # 课文要考模型的诗，一定不拿来训练

HERE = Path(__file__).resolve().parent
POEMS = HERE / "data" / "poems.txt"
CKPT = HERE / "ckpt.pt"
SNAPSHOT = HERE / "snapshot.pt"  # 训练到一半的存档，训练完成后删掉
DEVICE = ("cuda" if torch.cuda.is_available() else
          "mps" if torch.backends.mps.is_available() else "cpu")


def split(poems):
    """分成 (训练集, 验证集)，都是 list[str]。有 HELD_OUT 的诗都在验证集里，其余的随机挑。"""
    poems = list(poems)
    random.Random(SPLIT_SEED).shuffle(poems)
    asked = [poem for poem in poems if any(line in poem for line in HELD_OUT)]
    others = [poem for poem in poems if not any(line in poem for line in HELD_OUT)]
    n_val = max(1, round(VAL_FRACTION * len(poems)), len(asked))
    poems = asked + others
    return poems[n_val:], poems[:n_val]


def get_batch(data, poem_starts, block_size):
    """随机取一批，返回 (x, y)，都是 (BATCH_SIZE, block_size) 的编号；y 是 x 往后错一个字。

    data：全部文字的编号；poem_starts：每首诗前面的换行符在 data 里的位置。
    """
    n_anywhere = BATCH_SIZE // 2  # 一半从一首诗的开头读起，一半从任意的地方读起
    chosen = torch.randint(len(poem_starts), (BATCH_SIZE - n_anywhere,))
    anywhere = torch.randint(len(data) - block_size, (n_anywhere,))
    starts = torch.cat([poem_starts[chosen], anywhere])
    at = starts[:, None] + torch.arange(block_size)  # (BATCH_SIZE, block_size)
    return data[at].to(DEVICE), data[at + 1].to(DEVICE)


def learning_rate(step):
    """第 step 步（从 1 数起）的学习率：升到最高，停在那里，最后降到 0。"""
    return LEARNING_RATE * min(1, step / WARMUP_STEPS, (MAX_STEPS - step) / DECAY_STEPS)


@torch.no_grad()
def evaluate(model, poems, tokenizer, skip=0):
    """验证集上的平均损失（nat/字）：每首诗从前面的换行符读到后面的换行符，每个字正好猜一次。

    skip=1：不给开头的换行符，从诗的第一个字读起，像第 1 节的提示词。比 block_size 长的诗分段读。
    """
    model.eval()
    block_size = model.config.block_size
    groups = {}  # 长度 -> 这么长的各段编号，放在一起算
    for poem in poems:
        ids = tokenizer.encode(f"\n{poem}\n")[skip:]
        for i in range(0, len(ids) - 1, block_size):
            piece = ids[i:i + block_size + 1]
            groups.setdefault(len(piece), []).append(piece)
    total = 0.0
    n = 0
    for group in groups.values():
        for ids in torch.tensor(group, device=DEVICE).split(2 * BATCH_SIZE):
            x, y = ids[:, :-1], ids[:, 1:]
            _, loss = model(x, y)
            total += loss.item() * y.numel()
            n += y.numel()
    return total / n


def write_poem(model, tokenizer):
    """用固定的种子写一首诗，不影响训练用的随机数。"""
    newline = torch.tensor([tokenizer.encode("\n")], device=DEVICE)  # (1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        ids = model.generate(newline, 80, temperature=0.8, stop=newline.item())
    return tokenizer.decode(ids[0].tolist()).strip().replace("\n", " ")


def train():
    """从头训练（RESUME：从存档接着训练）MAX_STEPS 步，返回要写进 ckpt.pt 的内容，dict。

    每次评估打印的训练损失，是上一次评估以来的平均；终端里一直在变的那一行，是最新一步的。
    """
    poems = read_poems(POEMS)
    tokenizer = Tokenizer.from_text("\n".join(poems) + "\n")
    config = GPTConfig(vocab_size=len(tokenizer))
    train_poems, val_poems = split(poems)
    check_corpus(poems, train_poems, config.block_size)
    data = torch.tensor(tokenizer.encode("\n" + "\n".join(train_poems) + "\n"))
    poem_starts = (data[:-config.block_size] == data[0]).nonzero()[:, 0]  # 每首前面的换行符

    torch.manual_seed(SEED)
    model = GPT(config).to(DEVICE)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  betas=(0.9, 0.99), fused=DEVICE != "mps")
    print_sizes(poems, data, val_poems, model)

    recipe = collect_recipe(config, train_poems, val_poems)
    step = 0  # 训练完了几步
    seconds = 0.0  # 训练用了几秒，评估不算
    if RESUME:
        step, seconds = load_snapshot(model, optimizer, recipe)
    saved_step = step  # 存档是第几步的
    losses = []  # 上一次评估以来，每一步的损失
    speed = ""
    began = time.perf_counter()
    while True:
        if step % EVAL_EVERY == 0 or step == MAX_STEPS:
            seconds += time.perf_counter() - began
            val_loss = evaluate(model, val_poems, tokenizer)
            openings_loss = evaluate(model, val_poems, tokenizer, skip=1)
            print_losses(step, losses, val_loss, openings_loss, speed)
            print("    " + write_poem(model, tokenizer), flush=True)
            if step > saved_step:
                save(take_snapshot(model, optimizer, recipe, step, seconds), SNAPSHOT)
                saved_step = step
            if step == MAX_STEPS:
                break
            losses = []
            began = time.perf_counter()

        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1)
        x, y = get_batch(data, poem_starts, config.block_size)
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 梯度太大时缩小，一步不会走太远
        optimizer.step()
        step += 1

        losses.append(loss.item())
        speed = describe_speed(step, (time.perf_counter() - began) / len(losses), config)
        update_line(step, losses[-1], speed)
    return make_checkpoint(model, tokenizer, val_loss, openings_loss, seconds)


# 以下只管速度、存档和检查，课文不讲
# Linux 上有的 CPU 有专算 16 位小数（bfloat16）的指令，矩阵乘法快得多；没有的照旧用 32 位
CAPABILITIES = getattr(torch.cpu, "get_capabilities", dict)() if sys.platform == "linux" else {}
HAS_BFLOAT16 = CAPABILITIES.get("avx512_bf16", False)

# 终端里 \r 回到行首，进度只占一行；IDLE、Jupyter 换掉了 sys.stdout，那里和文件里都只打印整行
IN_PLACE = sys.stdout and sys.stdout is sys.__stdout__ and sys.stdout.isatty()
LINE_START = "\r" if IN_PLACE and os.environ.get("TERM") != "dumb" else ""


def keep_memory():
    """Linux 的 glibc 每一步都把大块内存还给系统，下一步再要回来；让它留着，训练快两成。"""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0)  # M_MMAP_MAX：大块也从堆里分配
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD：堆顶空着也不归还


def print_sizes(poems, data, val_poems, model):
    """开始训练以前，打印语料和模型有多大。"""
    config = model.config
    print(f"语料：{len(poems):,} 首诗，{len(data) - 1:,} 个字训练，"
          f"{sum(len(poem) + 1 for poem in val_poems):,} 个字验证，词表 {config.vocab_size:,} 个字")
    print(f"模型：{sum(p.numel() for p in model.parameters()):,} 个参数，{config.n_layer} 层，"
          f"{config.n_head} 个头，{config.n_embd} 维，block_size {config.block_size}；"
          f"在 {DEVICE} 上训练", flush=True)


def print_losses(step, losses, val_loss, openings_loss, speed):
    """每次评估打印的一行；losses：上一次评估以来每一步的损失，还没有训练时是空的。"""
    train_loss = f"训练损失 {sum(losses) / len(losses):.4f}  " if losses else ""
    print(f"{LINE_START}第 {step}/{MAX_STEPS} 步  {train_loss}验证损失 {val_loss:.4f}"
          f"（不给开头的换行符 {openings_loss:.4f}）  {speed}")


def update_line(step, loss, speed):
    """终端里一直在变的那一行。"""
    if LINE_START:
        print(f"{LINE_START}第 {step}/{MAX_STEPS} 步  训练损失 {loss:.4f}  {speed}  ",
              end="", flush=True)


def describe_speed(step, pace, config):
    """训练有多快，还要多久；pace：每步几秒。"""
    left = int(pace * (MAX_STEPS - step))
    return f"{BATCH_SIZE * config.block_size / pace:,.0f} 字/秒  还要 {left // 60}:{left % 60:02d}"


def take_snapshot(model, optimizer, recipe, step, seconds):
    """接着训练要用的一切，dict：load_snapshot 读的就是它。"""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "recipe": recipe,
            "random": torch.get_rng_state(), "step": step, "seconds": seconds}


def make_checkpoint(model, tokenizer, val_loss, openings_loss, seconds):
    """ckpt.pt 的内容，dict：generate.py 读的就是它。只有张量、数字和文字，读它不会运行代码。"""
    facts = {"val_loss": val_loss, "openings_loss": openings_loss, "max_steps": MAX_STEPS,
             "seed": SEED, "minutes": seconds / 60, "torch": torch.__version__.split("+")[0]}
    return {"model": model.cpu().state_dict(), "config": asdict(model.config),
            "chars": tokenizer.chars, "training": facts}


def save(content, path):
    """一步换上新文件：先写进自己的临时文件，写完整了再改名。

    写不了就用一句话结束，原来的文件不动。两个 train.py 一起写，也各写各的，后改名的算数。
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(buffer.getbuffer())
            f.flush()
            os.fsync(f.fileno())  # 真的写到磁盘上了，才改名
        os.replace(temporary, path)
    except OSError as e:
        sys.exit(f"写不了 {path}（系统说：{e.strerror}），原来的文件没有动；"
                 f"请看看磁盘满没满、文件夹 {path.parent} 能不能写。{way_out()}")
    finally:
        remove(temporary)


def remove(path):
    """删掉一个用完的文件；删不掉也没有关系。"""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def way_out():
    """怎样接着训练，写成一句话：看文件夹里现在有没有存档。"""
    try:
        step = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)["step"]
    except Exception:  # 没有，或者读不出来
        return "还没有能用的存档，再运行就是从头训练"
    return f"{SNAPSHOT.name} 是第 {step} 步的存档，把 RESUME 改成 True 再运行，就从那里接着训练"


def collect_recipe(config, *texts):
    """这些和存档里的不一样，就不能接着训练：各个常量、模型的尺寸、分好的诗（记 SHA-256）。"""
    constants = {name: value for name, value in globals().items()
                 if name.isupper() and name != "EVAL_EVERY" and type(value) in (int, float, tuple)}
    digest = hashlib.sha256(repr(texts).encode("utf-8")).hexdigest()
    return constants | asdict(config) | {"诗的 SHA-256": digest[:16]}


def load_snapshot(model, optimizer, recipe):
    """从存档恢复模型、优化器和随机数，返回 (第几步, 用了几秒)。存档不能用时用一句话结束。"""
    restart = "把 RESUME 改成 False，从头训练"
    try:
        snapshot = torch.load(SNAPSHOT, map_location=DEVICE, weights_only=True)
        was = snapshot["recipe"]
        changed = [f"{name} 是 {was.get(name)}（现在是 {recipe[name]}）"
                   for name in recipe if was.get(name) != recipe[name]]
    except FileNotFoundError:
        sys.exit(f"没有存档 {SNAPSHOT}，请{restart}")
    except Exception as e:  # 坏文件的坏法很多
        sys.exit(f"存档 {SNAPSHOT} 读不出来（{type(e).__name__}），请删掉它，{restart}")
    if changed:
        sys.exit(f"存档 {SNAPSHOT} 来自另一种配置：{'、'.join(changed)}。请改回去，或者{restart}")
    try:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        torch.set_rng_state(snapshot["random"].cpu())
        step, seconds = int(snapshot["step"]), float(snapshot["seconds"])
    except Exception as e:  # 缺了一部分，或者和模型的形状不同
        sys.exit(f"存档 {SNAPSHOT} 和现在的 gpt.py、train.py 对不上（{type(e).__name__}）："
                 f"改过代码，就改回去；没有改过，请删掉它，{restart}")
    print(f"从第 {step} 步的存档接着训练", flush=True)
    return step, seconds


def read_poems(path):
    """读语料，返回 list[str]，一行一首。文件不对时用一句话结束。"""
    way_back = "或者取回课程自带的（git checkout data/poems.txt，或者再解压一次下载的压缩包）"
    try:
        raw = path.read_bytes()
    except OSError as e:
        sys.exit(f"{path} 读不出来（系统说：{e.strerror}），请看看它在不在，{way_back}")
    for mark, wrong in ((b"\0", "存成了 UTF-16"), (b"\xef\xbb\xbf", "里有字节顺序标记（BOM）"),
                        (b"\r", "用了 Windows 的换行符（CRLF）")):
        if mark in raw:
            sys.exit(f"{path} {wrong}，请存成不带 BOM 的 UTF-8、LF 换行，{way_back}")
    poems = raw.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    for i, poem in enumerate(poems, 1):
        if poem.split() != [poem] or "\ufffd" in poem:
            sys.exit(f"{path} 的第 {i} 行是空的，有空格，或者不是 UTF-8，应为一行一首诗，"
                     f"请改好，{way_back}")
    return poems


def check_corpus(poems, train_poems, block_size):
    """检查语料够不够训练；不够时用一句话结束。"""
    if not train_poems:
        sys.exit(f"{POEMS} 里的 {len(poems)} 首诗都留作验证了，没有剩下训练用的；"
                 "请添上几首没有 HELD_OUT 里句子的诗，或者把 VAL_FRACTION 改小")
    for mark in "，。":
        if not any(mark in poem for poem in poems):
            sys.exit(f"{POEMS} 里没有「{mark}」，generate.py 写诗要用它；请在语料里用上这个标点")
    n = sum(len(poem) + 1 for poem in train_poems)
    if n < block_size:
        sys.exit(f"{POEMS} 里用来训练的只有 {n} 个字，至少要有 block_size（{block_size}）个；"
                 "请添上几首，或者把 block_size、VAL_FRACTION 改小")


def check_constants():
    """检查文件开头的常量，和 gpt.py 里的尺寸；不合理时抛出 BadValue。"""
    GPTConfig()
    for name, value in (("SEED", SEED), ("SPLIT_SEED", SPLIT_SEED)):
        check(is_integer(value) and 0 <= value < 2**63,
              name, value, f" 0 到 {2**63 - 1} 的整数")
    for name, value in (("MAX_STEPS", MAX_STEPS), ("EVAL_EVERY", EVAL_EVERY),
                        ("BATCH_SIZE", BATCH_SIZE), ("WARMUP_STEPS", WARMUP_STEPS),
                        ("DECAY_STEPS", DECAY_STEPS)):
        check(is_integer(value) and value >= 1, name, value, "不小于 1 的整数")
    check(is_number(LEARNING_RATE) and 0 < LEARNING_RATE <= 1,
          "LEARNING_RATE", LEARNING_RATE, " 0 到 1 的数，不含 0")
    check(is_number(WEIGHT_DECAY) and 0 <= WEIGHT_DECAY <= 1,
          "WEIGHT_DECAY", WEIGHT_DECAY, " 0 到 1 的数")
    check(isinstance(RESUME, bool), "RESUME", RESUME, " True 或 False")
    check(is_number(VAL_FRACTION) and 0 < VAL_FRACTION < 1,
          "VAL_FRACTION", VAL_FRACTION, "大于 0、小于 1 的数")
    check(isinstance(HELD_OUT, tuple), "HELD_OUT", HELD_OUT,
          '元组，只有一项时也要写逗号，如 ("黄河入海流",)')
    for line in HELD_OUT:
        check(isinstance(line, str) and line != "", "HELD_OUT 里的句子", line, "至少 1 个字的文字")


def stamp(path):
    """文件换过没有，看这两个数；没有文件时是 None。"""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def leave(why, before):
    """用一句话结束：为什么停了，ckpt.pt 换过没有，怎样接着训练。

    before：开始训练以前 ckpt.pt 的 stamp。
    """
    if stamp(CKPT) != before:
        sys.exit(f"{why}；新的 ckpt.pt 已经写好。")
    sys.exit(f"{why}；原来的 ckpt.pt 没有动，{way_out()}。")


def main():
    try:
        check_constants()
    except BadValue as e:
        sys.exit(str(e))
    keep_memory()
    before = stamp(CKPT)
    try:
        if SNAPSHOT.exists() and not RESUME:
            print(f"注意：上一次训练留下了存档 {SNAPSHOT.name}，这次从头训练会覆盖它。"
                  "想接着上一次的训练，现在按 Ctrl-C，把 RESUME 改成 True", flush=True)
        content = train()
        save(content, CKPT)
        remove(SNAPSHOT)
        seconds = round(content["training"]["minutes"] * 60)
        print(f"训练用了 {seconds // 60}:{seconds % 60:02d}，写进了 {CKPT}", flush=True)
    except KeyboardInterrupt:
        leave("\n训练停下了", before)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE, errno.EINVAL):  # Windows 上管道断了是 EINVAL
            raise
        sys.stdout = None  # 不再打印
        leave("没有打印完：磁盘满了，或者接收输出的程序先结束了", before)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # IDLE、Jupyter 的输出没有这个方法，本来就是 UTF-8
            stream.reconfigure(encoding="utf-8")
    main()
