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
import sqlite3
import sys
import time
from dataclasses import asdict
from numbers import Real
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # 课文不讲，放在最前面是因为导入 torch 要几秒：一个文件夹里只许一个 train.py
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        lock = sqlite3.connect(HERE / "train.lock", timeout=0)
        lock.execute("BEGIN EXCLUSIVE")  # 进程一结束锁就没了，被杀掉也一样
    except sqlite3.OperationalError as e:
        sys.exit("这个文件夹里已经有一个 train.py 在训练，请等它结束" if "locked" in str(e)
                 else f"文件夹 {HERE} 不能写（{e}），请换一个能写的文件夹")

import torch

from gpt import GPT, GPTConfig, check
from tokenizer import Tokenizer

SEED = 6  # 随机种子：从 1 数起试，第一个试出课文的说法 1、2、8 成立的（怎么试的，见 README）
MAX_STEPS = 3550  # 一共训练多少步：从 3,200 起每隔 50 步试一个，这个种子的说法成立的最短的
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

POEMS = HERE / "data" / "poems.txt"
CKPT = HERE / "ckpt.pt"
SNAPSHOT = HERE / "snapshot.pt"  # 训练到一半的存档，训练完成后删掉
DEVICE = ("cuda" if torch.cuda.is_available() else
          "mps" if torch.backends.mps.is_available() else "cpu")


def split(poems):
    """分成 (训练集, 验证集)，都是 list[str]：打乱后取前 5% 验证，含有 HELD_OUT 的诗排在最前面。"""
    poems = list(poems)
    random.Random(SPLIT_SEED).shuffle(poems)
    poems.sort(key=lambda poem: not any(line in poem for line in HELD_OUT))
    n_val = max(1, round(VAL_FRACTION * len(poems)))
    return poems[n_val:], poems[:n_val]


def get_batch(data, poem_starts, block_size):
    """随机取一批，返回 (x, y)，都是 (BATCH_SIZE, block_size) 的编号；y 是 x 往后错一个字。

    data：全部文字的编号；poem_starts：每首诗前面的换行符在 data 里的位置。
    """
    n_anywhere = BATCH_SIZE // 2  # 一半从一首诗的开头读起，一半从任意的地方读起
    starts = torch.cat([poem_starts[torch.randint(len(poem_starts), (BATCH_SIZE - n_anywhere,))],
                        torch.randint(len(data) - block_size, (n_anywhere,))])
    at = starts[:, None] + torch.arange(block_size)  # (BATCH_SIZE, block_size)
    return data[at].to(DEVICE), data[at + 1].to(DEVICE)


def learning_rate(step):
    """第 step 步（从 1 数起）的学习率：升到最高，停在那里，最后降到 0。"""
    return LEARNING_RATE * min(1, step / WARMUP_STEPS, (MAX_STEPS - step) / DECAY_STEPS)


@torch.no_grad()
def evaluate(model, poems, tokenizer, skip=0):
    """验证集上的平均损失（nat/字）：每首诗从前面的换行符读到后面的换行符，每个字正好猜一次。

    skip=1：不给前面的换行符，从诗的第一个字读起，像第 1 节的提示词。比 block_size 长的诗分段读。
    """
    model.eval()
    block_size, groups, total, n = model.config.block_size, {}, 0.0, 0
    for poem in poems:
        ids = tokenizer.encode(f"\n{poem}\n")[skip:]
        for i in range(0, len(ids) - 1, block_size):
            piece = ids[i:i + block_size + 1]
            groups.setdefault(len(piece), []).append(piece)
    for group in groups.values():  # 一样长的一起算
        for ids in torch.tensor(group, device=DEVICE).split(2 * BATCH_SIZE):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            total, n = total + loss.item() * ids[:, 1:].numel(), n + ids[:, 1:].numel()
    return total / n


def write_poem(model, tokenizer):
    """用固定的种子写一首诗，不影响训练用的随机数。"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        [newline] = tokenizer.encode("\n")
        ids = torch.tensor([[newline]], device=DEVICE)
        ids = model.generate(ids, 80, temperature=0.8, stop=newline)
    return tokenizer.decode(ids[0].tolist()).strip().replace("\n", " ")


def main():
    check_constants()
    keep_memory()
    poems = read_poems(POEMS)
    tokenizer = Tokenizer.from_text("\n".join(poems))
    train_poems, val_poems = split(poems)
    data = torch.tensor(tokenizer.encode("\n" + "\n".join(train_poems) + "\n"))
    config = GPTConfig(vocab_size=len(tokenizer))
    block_size = config.block_size
    poem_starts = (data[:-block_size] == data[0]).nonzero()[:, 0]  # 后面够一整段的换行符
    if len(poem_starts) == 0:
        sys.exit(f"{POEMS} 里用来训练的只有 {len(data)} 个字，应比 block_size（{block_size}）多")
    torch.manual_seed(SEED)
    model = GPT(config).to(DEVICE)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  betas=(0.9, 0.99), fused=DEVICE != "mps")
    print(f"语料：{len(poems):,} 首诗，{len(data) - 1:,} 个字训练，"
          f"{sum(len(poem) + 1 for poem in val_poems):,} 个字验证，词表 {len(tokenizer):,} 个字")
    print(f"模型：{sum(p.numel() for p in model.parameters()):,} 个参数，{config.n_layer} 层，"
          f"{config.n_head} 个头，{config.n_embd} 维，block_size {block_size}；在 {DEVICE} 上训练", flush=True)

    step, seconds = 0, 0.0  # 训练完了几步，用了几秒
    recipe = collect_recipe(config, train_poems, val_poems)
    if RESUME:
        step, seconds = load_snapshot(model, optimizer, recipe)
    saved, losses, speed, began = step, [], "", time.perf_counter()  # saved：存档是第几步的
    try:
        while True:
            if step % EVAL_EVERY == 0 or step == MAX_STEPS:
                seconds += time.perf_counter() - began
                val_loss = evaluate(model, val_poems, tokenizer)
                openings_loss = evaluate(model, val_poems, tokenizer, skip=1)
                train_loss = f"训练损失 {sum(losses) / len(losses):.4f}  " if losses else ""
                print(f"{START}第 {step}/{MAX_STEPS} 步  {train_loss}验证损失 {val_loss:.4f}"
                      f"（不给换行符 {openings_loss:.4f}）  {speed}\n"
                      f"    {write_poem(model, tokenizer)}", flush=True)
                if step > saved:
                    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                          "seconds": seconds, "random": torch.get_rng_state(), "recipe": recipe}, SNAPSHOT)
                    saved = step
                if step == MAX_STEPS:
                    break
                losses, began = [], time.perf_counter()

            model.train()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step + 1)
            x, y = get_batch(data, poem_starts, block_size)
            with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
                _, loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1

            losses.append(loss.item())
            pace = (time.perf_counter() - began) / len(losses)  # 每步几秒
            left = int(pace * (MAX_STEPS - step))
            speed = f"{BATCH_SIZE * block_size / pace:,.0f} 字/秒  还要 {left // 60}:{left % 60:02d}"
            if START:
                print(f"\r第 {step}/{MAX_STEPS} 步  训练损失 {losses[-1]:.4f}  {speed}  ", end="", flush=True)
        training = {"val_loss": val_loss, "openings_loss": openings_loss, "max_steps": MAX_STEPS,
                    "seed": SEED, "minutes": seconds / 60, "torch": torch.__version__.split("+")[0]}
        save({"model": model.cpu().state_dict(), "config": asdict(config), "chars": tokenizer.chars,
              "training": training}, CKPT)
    except KeyboardInterrupt:
        again = f"把 RESUME 改成 True 再运行，就从第 {saved} 步的存档接着训练" if saved else "还没有存档"
        sys.exit(f"\n训练停在第 {step} 步，原来的 ckpt.pt 没有动；{again}。")
    SNAPSHOT.unlink(missing_ok=True)
    print(f"训练用了 {int(seconds) // 60}:{int(seconds) % 60:02d}，写进了 {CKPT}", flush=True)


# 以下只管速度、存档和检查，课文不讲
# Linux 上有的 CPU 有专算 16 位小数（bfloat16）的指令，矩阵乘法快得多；没有的照旧用 32 位
CAPABILITIES = getattr(torch.cpu, "get_capabilities", dict)() if sys.platform == "linux" else {}
HAS_BFLOAT16 = CAPABILITIES.get("avx512_bf16", False)
# 终端里 \r 回到行首，进度只占一行；IDLE、Jupyter 换掉了 sys.stdout，那里和文件里都只打印整行
IS_TERMINAL = sys.stdout and sys.stdout is sys.__stdout__ and sys.stdout.isatty()
START = "\r" if IS_TERMINAL and os.environ.get("TERM") != "dumb" else ""


def keep_memory():
    """Linux 的 glibc 每一步都把大块内存还给系统，下一步再要回来；让它留着，训练快两成。"""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0)  # M_MMAP_MAX：大块也从堆里分配
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD：堆顶空着也不归还


def save(content, path):
    """一步换上新文件：先写进临时文件，写完整了再改名。写不了就用一句话结束，原来的文件不动。"""
    buffer, temporary = io.BytesIO(), path.with_name(path.name + ".tmp")
    torch.save(content, buffer)
    try:
        with open(temporary, "wb") as f:
            f.write(buffer.getbuffer())
            f.flush()
            os.fsync(f.fileno())  # 真的写到磁盘上了，才改名
        os.replace(temporary, path)
    except OSError as e:
        sys.exit(f"写不了 {path}（{e.strerror}），原来的文件没有动；请看看磁盘满没满、"
                 f"文件夹 {path.parent} 能不能写")
    finally:
        temporary.unlink(missing_ok=True)


def collect_recipe(config, *texts):
    """这些和存档里的不一样，就不能接着训练：各个常量、模型的尺寸、分好的诗（记它们的 SHA-256）。"""
    constants = {name: value for name, value in globals().items()
                 if name.isupper() and name != "EVAL_EVERY" and type(value) in (int, float, tuple)}
    digest = hashlib.sha256(repr(texts).encode("utf-8")).hexdigest()
    return constants | asdict(config) | {"诗的 SHA-256": digest[:16]}


def load_snapshot(model, optimizer, recipe):
    """从存档恢复模型、优化器和随机数，返回 (第几步, 用了几秒)。存档不能用时用一句话结束。"""
    again = "把 RESUME 改成 False，从头训练"
    try:
        snapshot = torch.load(SNAPSHOT, map_location=DEVICE, weights_only=True)
        was = snapshot["recipe"]
        changed = [f"{name} 是 {was.get(name)}（现在是 {recipe[name]}）"
                   for name in recipe if was.get(name) != recipe[name]]
    except FileNotFoundError:
        sys.exit(f"没有存档 {SNAPSHOT}，请{again}")
    except Exception as e:  # 坏文件的坏法很多
        sys.exit(f"存档 {SNAPSHOT} 读不出来（{type(e).__name__}），请删掉它，{again}")
    if changed:
        sys.exit(f"存档 {SNAPSHOT} 来自另一种配置：{'、'.join(changed)}。请改回去，或者{again}")
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    torch.set_rng_state(snapshot["random"].cpu())
    print(f"从第 {snapshot['step']} 步的存档接着训练", flush=True)
    return snapshot["step"], snapshot["seconds"]


def read_poems(path):
    """读语料，返回 list[str]，一行一首。文件不对时用一句话结束。"""
    again = "或者取回课程自带的（git checkout data/poems.txt，或者再解压一次下载的压缩包）"
    try:
        raw = path.read_bytes()
    except OSError as e:
        sys.exit(f"{path} 读不出来（{e.strerror}），请看看它在不在，{again}")
    for mark, wrong in ((b"\0", "存成了 UTF-16"), (b"\xef\xbb\xbf", "里有字节顺序标记（BOM）"),
                        (b"\r", "用了 Windows 的换行符（CRLF）")):
        if mark in raw:
            sys.exit(f"{path} {wrong}，请存成不带 BOM 的 UTF-8、LF 换行，{again}")
    poems = raw.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    for i, poem in enumerate(poems, 1):
        if poem.split() != [poem] or "\ufffd" in poem:
            sys.exit(f"{path} 的第 {i} 行是空的，有空格，或者不是 UTF-8，应为一行一首诗，请改好，{again}")
    return poems


def check_constants():
    """常量不合理时用一句话结束：哪个常量，应为什么，得到什么。"""
    try:
        GPTConfig()  # gpt.py 里的尺寸也先检查一遍
        check(0, 2**63 - 1, SEED=SEED, SPLIT_SEED=SPLIT_SEED)
        check(1, MAX_STEPS=MAX_STEPS, EVAL_EVERY=EVAL_EVERY, BATCH_SIZE=BATCH_SIZE,
              WARMUP_STEPS=WARMUP_STEPS, DECAY_STEPS=DECAY_STEPS)
        check(0, 1, Real, zero=False, LEARNING_RATE=LEARNING_RATE, VAL_FRACTION=VAL_FRACTION)
        check(0, 1, Real, WEIGHT_DECAY=WEIGHT_DECAY)
    except ValueError as e:
        sys.exit(str(e))
    if SNAPSHOT.exists() and not RESUME:
        print(f"注意：上一次训练留下了存档 {SNAPSHOT.name}，这次从头训练，会覆盖它。"
              "想接着上一次的训练，现在按 Ctrl-C，把 RESUME 改成 True", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n已停止，什么也没有动。")
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        sys.stdout = None  # 不再打印
        sys.exit("没有打印完：磁盘满了，或者接收输出的程序先结束了")
    finally:
        lock.close()
