"""训练：用 data/poems.txt 里的唐诗训练 gpt.py 里的模型，写出 ckpt.pt。

python train.py 要二十分钟到一小时。随时可以按 Ctrl-C 停下，原来的 ckpt.pt 不会动；
把 RESUME 改成 True 再运行，就从上一次存档接着训练。改模型的尺寸，请改 gpt.py 里的 GPTConfig。
"""
import ctypes
import io
import math
import os
import random
import sys
import time
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

from gpt import GPT, GPTConfig, check, start_script
from tokenizer import Tokenizer

SEED = 1  # 训练用的随机种子
MAX_STEPS = 13000  # 一共训练多少步
EVAL_EVERY = 1000  # 每隔多少步评估一次，并且存档
BATCH_SIZE = 10  # 每一步看多少段文字；全部分数占 10 × 128 × 6289 × 4 字节，不到 32 MB
WINDOW_PARTS = (1, 1, 1, 1, 1, 64)  # 每一步随机取一个数 n：每段长 block_size / n，段数乘 n
LEARNING_RATE = 2e-3  # 最高的学习率
MIN_LEARNING_RATE = 8e-4  # 最低的学习率；不降到 0，短的提示词后面的概率才不走样
WARMUP_STEPS = 200  # 先用这么多步从 0 升到最高，再沿余弦降到最低
WEIGHT_DECAY = 0.1  # 权重衰减，只用在矩阵上
EMA_DECAY = 0.9996  # 评估和保存的是权重的滑动平均，比最后一步的权重更稳，损失也更低
RESUME = False  # True：从上一次存档接着训练
VAL_FRACTION = 0.05  # 留作验证的诗占多少
SPLIT_SEED = 1  # 挑选验证集用的随机种子
HELD_OUT = ("黄河入海流", "疑是地上霜", "大漠孤烟直")  # 课文要考模型的诗，一定不拿来训练

HERE = Path(__file__).resolve().parent
POEMS = HERE / "data" / "poems.txt"
CKPT = HERE / "ckpt.pt"
SNAPSHOT = HERE / "snapshot.pt"  # 训练到一半的存档，训练完成后删掉
RECIPE = ("SEED", "MAX_STEPS", "EVAL_EVERY", "BATCH_SIZE", "WINDOW_PARTS", "LEARNING_RATE", "MIN_LEARNING_RATE",
          "WARMUP_STEPS", "WEIGHT_DECAY", "EMA_DECAY", "VAL_FRACTION", "SPLIT_SEED")
DEVICE = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
# 有的 CPU 有专算 16 位小数（bfloat16）的指令，矩阵乘法快得多；没有的，还有别的系统，照旧用 32 位
BF16 = sys.platform == "linux" and getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)


def read_poems(path):
    """读语料，返回 list[str]，一首一个。文件不存在抛出 FileNotFoundError，内容不对抛出 ValueError。"""
    back = "请用 git checkout data/poems.txt 取回"
    if not path.exists():
        raise FileNotFoundError(f"找不到 {path}，{back}")
    raw = path.read_bytes()
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ValueError(f"{path} 开头有字节顺序标记（BOM），请存成不带 BOM 的 UTF-8，或者{back}")
    if b"\r" in raw:
        raise ValueError(f"{path} 用了 Windows 的换行符（CRLF），请存成 LF 换行，或者{back}")
    try:
        poems = raw.decode("utf-8").split()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} 的第 {e.start} 个字节不是 UTF-8，请存成 UTF-8，或者{back}") from None
    if len(poems) < 2:
        raise ValueError(f"{path} 里只有 {len(poems)} 首诗，至少要 2 首才能分出训练集和验证集，{back}")
    return poems


def split(poems):
    """分成 (训练集, 验证集)，都是 list[str]：打乱后取前 5% 验证，含有 HELD_OUT 的诗排在最前面。"""
    poems = list(poems)
    random.Random(SPLIT_SEED).shuffle(poems)
    poems.sort(key=lambda poem: not any(line in poem for line in HELD_OUT))
    n_val = max(1, round(VAL_FRACTION * len(poems)))
    return poems[n_val:], poems[:n_val]


def get_batch(data, poem_starts, block_size):
    """随机取一批，返回 (x, y)，都是 (段数, 段长) 的编号；y 是 x 往后错一个字。

    data：全部文字的编号；poem_starts：每首诗前面的换行符在 data 里的位置。
    """
    parts = min(WINDOW_PARTS[torch.randint(len(WINDOW_PARTS), ())], block_size)
    length = block_size // parts
    if parts == 1:  # 整段的从一首诗的开头读起：写诗时就是这样
        start = poem_starts[torch.randint(len(poem_starts), (BATCH_SIZE, 1))]
    else:  # 短的从哪里读起都行：第 1 节的提示词就是半截
        start = torch.randint(len(data) - length, (BATCH_SIZE * parts, 1))
    at = start + torch.arange(length)  # (段数, 段长)
    return data[at].to(DEVICE), data[at + 1].to(DEVICE)


@torch.no_grad()
def evaluate(model, poems, tokenizer):
    """验证集上的平均损失（nat/字）：每首诗从换行符读起，每个字和末尾的换行正好猜一次。比 block_size 长的诗分段读。"""
    model.eval()
    block_size, groups, total, count = model.config.block_size, {}, 0.0, 0
    for poem in poems:
        ids = tokenizer.encode(f"\n{poem}\n")
        for i in range(0, len(ids) - 1, block_size):
            piece = ids[i:i + block_size + 1]
            groups.setdefault(len(piece), []).append(piece)
    for group in groups.values():  # 一样长的诗一起算
        for ids in torch.tensor(group).split(2 * BATCH_SIZE):
            x, y = ids[:, :-1].to(DEVICE), ids[:, 1:].to(DEVICE)
            total += model(x, y)[1].item() * y.numel()
            count += y.numel()
    return total / count


def learning_rate(step):
    """第 step 步（从 1 数起）的学习率：先升后降。"""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, MAX_STEPS - WARMUP_STEPS)
    return MIN_LEARNING_RATE + (LEARNING_RATE - MIN_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2


def poem(model, tokenizer):
    """用固定的种子写一首诗，不影响训练用的随机数。"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        newline = tokenizer.encode("\n")
        out = model.generate(torch.tensor([newline], device=DEVICE), 80, temperature=0.8, stop=newline[0])
    return tokenizer.decode(out[0].tolist()).strip().replace("\n", " ")


def save(content, path):
    """一步换上新文件：先写进临时文件，写完整了再改名。写不了时抛出 OSError，原来的文件不动。"""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())  # 真的写到磁盘上了，才改名
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:  # 磁盘满了，torch.save 抛出的是 RuntimeError
        raise OSError(f"写不了 {path}（{e}），原来的文件没有动；请看看磁盘满没满、文件夹能不能写") from None
    finally:
        temporary.unlink(missing_ok=True)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def chart(history):
    """验证损失的变化，画成横条：list[str]，一次评估一行。"""
    losses = [loss for _, loss in history]
    low, high = min(losses), max(losses)
    return [f"{step:>7} 步  {loss:.4f}  " + "█" * (1 + round(40 * (loss - low) / max(high - low, 1e-9)))
            for step, loss in history]


def check_constants():
    """常量不合理时抛出 ValueError。"""
    for name in ("SEED", "MAX_STEPS", "EVAL_EVERY", "BATCH_SIZE", "WARMUP_STEPS", "SPLIT_SEED"):
        least = 0 if name in ("SEED", "WARMUP_STEPS", "SPLIT_SEED") else 1
        check(name, globals()[name], Integral, lambda n: n >= least, f"不小于 {least} 的整数")
    check("WARMUP_STEPS", WARMUP_STEPS, Integral, lambda n: n < MAX_STEPS, f"小于 MAX_STEPS（{MAX_STEPS}）的整数")
    check("WINDOW_PARTS", WINDOW_PARTS, tuple, lambda w: w and all(isinstance(n, int) and n >= 1 for n in w),
          "不小于 1 的整数组成的元组，如 (1, 1, 4)")
    check("LEARNING_RATE", LEARNING_RATE, Real, lambda x: 0 < x < math.inf, "大于 0 的数")
    check("MIN_LEARNING_RATE", MIN_LEARNING_RATE, Real, lambda x: 0 <= x <= LEARNING_RATE,
          f"从 0 到 LEARNING_RATE（{LEARNING_RATE}）的数")
    check("WEIGHT_DECAY", WEIGHT_DECAY, Real, lambda x: 0 <= x < math.inf, "不小于 0 的数")
    check("EMA_DECAY", EMA_DECAY, Real, lambda x: 0 <= x < 1, "不小于 0、小于 1 的数")
    check("VAL_FRACTION", VAL_FRACTION, Real, lambda x: 0 < x < 1, "大于 0、小于 1 的数")
    check("RESUME", RESUME, bool, lambda x: True, " True 或 False")


def keep_memory():
    """Linux 的内存分配器（glibc）每一步都把大块内存还给系统，下一步再要回来；让它留着，快一两成。别的系统不需要。"""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0)  # M_MMAP_MAX：大块也从堆里分配
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD：堆顶空着也不归还


def new_training(config):
    """按常量搭好模型、权重的滑动平均和优化器。"""
    torch.manual_seed(SEED)
    model = GPT(config).to(DEVICE)
    # 滑动平均：旧的占 EMA_DECAY，新的占其余；前 n 步还短，只平均最近的 n/10 步左右
    average = AveragedModel(model, avg_fn=lambda old, new, n: old.lerp(new, max(1 - EMA_DECAY, 10 / (10 + n.item()))))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=(0.9, 0.99), fused=DEVICE != "mps")
    return {"model": model, "average": average, "optimizer": optimizer}


def load_snapshot(parts, recipe):
    """从存档恢复 parts 和随机数，返回 progress。没有存档、存档坏了或配置不同时抛出错误。"""
    if not SNAPSHOT.exists():
        raise FileNotFoundError(f"没有存档 {SNAPSHOT}，请把 RESUME 改成 False，从头训练")
    raw = io.BytesIO(SNAPSHOT.read_bytes())
    try:
        snapshot = torch.load(raw, map_location=DEVICE, weights_only=True)
        changed = [name for name in recipe if snapshot["recipe"].get(name) != recipe[name]]
    except Exception as e:  # 坏文件的坏法很多
        raise ValueError(f"存档 {SNAPSHOT} 读不出来（{type(e).__name__}），请删掉它，把 RESUME 改成 False，从头训练") from None
    if changed:
        was = "、".join(f"{name} 是 {snapshot['recipe'].get(name)}（现在是 {recipe[name]}）" for name in changed)
        raise ValueError(f"存档 {SNAPSHOT} 来自另一种配置：{was}。请改回去，或者把 RESUME 改成 False，从头训练")
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])
    torch.set_rng_state(snapshot["random"].cpu())
    return snapshot["progress"]


def train_step(parts, data, poem_starts, step):
    """训练一步，返回这一步的损失（nat/字）。"""
    model, average, optimizer = parts.values()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    model.train()
    x, y = get_batch(data, poem_starts, model.config.block_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        _, loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update_parameters(model)
    return loss.item()


def train(parts, progress, recipe, training, validation, tokenizer):
    """训练到 MAX_STEPS 步，每隔 EVAL_EVERY 步评估、存档；progress 随时更新。"""
    average = parts["average"].module
    data = torch.tensor(tokenizer.encode("\n" + "\n".join(training) + "\n"))
    poem_starts = (data[:-average.config.block_size] == data[0]).nonzero()[:, 0]  # 后面够一整段的换行符
    if progress["step"] == 0:
        loss = evaluate(average, validation, tokenizer)
        print(f"第 0/{MAX_STEPS} 步  验证损失 {loss:.4f}  还没有训练，写出来的是：\n    {poem(average, tokenizer)}", flush=True)
    losses, began = [], time.perf_counter()
    while progress["step"] < MAX_STEPS:
        step = progress["step"] = progress["step"] + 1
        losses.append(train_step(parts, data, poem_starts, step))
        pace = (time.perf_counter() - began) / len(losses)  # 每步几秒
        speed = f"{BATCH_SIZE * average.config.block_size / pace:,.0f} 字/秒  还要 {clock(pace * (MAX_STEPS - step))}"
        if step % EVAL_EVERY and step < MAX_STEPS:
            if sys.stdout.isatty():
                print(f"\r第 {step}/{MAX_STEPS} 步  训练损失 {losses[-1]:.4f}  {speed}  ", end="", flush=True)
            continue

        train_loss, loss = sum(losses) / len(losses), evaluate(average, validation, tokenizer)
        if not math.isfinite(train_loss + loss):
            raise ValueError(f"到第 {step} 步，损失成了 {loss}，训练失败了：请把 LEARNING_RATE（{LEARNING_RATE}）改小")
        if loss < min((past for _, past in progress["history"]), default=math.inf):
            progress["best"] = {name: w.detach().cpu().clone() for name, w in average.state_dict().items()}
        progress["history"].append((step, loss))
        print(f"{chr(13) if sys.stdout.isatty() else ''}第 {step}/{MAX_STEPS} 步  训练损失 {train_loss:.4f}  "
              f"验证损失 {loss:.4f}  {speed}\n    {poem(average, tokenizer)}", flush=True)
        progress["seconds"] += time.perf_counter() - began
        state = {name: part.state_dict() for name, part in parts.items()}
        save(state | {"progress": progress, "recipe": recipe, "random": torch.get_rng_state()}, SNAPSHOT)
        progress["saved"] = step
        losses, began = [], time.perf_counter()


def main():
    check_constants()
    keep_memory()
    poems = read_poems(POEMS)
    tokenizer = Tokenizer.from_text("\n".join(poems))
    config = GPTConfig(vocab_size=len(tokenizer))
    training, validation = split(poems)
    n_train, n_val = (sum(len(poem) + 1 for poem in part) for part in (training, validation))  # 换行也算
    check(f"{POEMS} 里用来训练的字数", n_train, int, lambda n: n > config.block_size, f"大于 block_size（{config.block_size}）的数")
    parts = new_training(config)
    print(f"语料：{len(poems):,} 首诗，{n_train:,} 个字训练，{n_val:,} 个字验证，词表 {len(tokenizer):,} 个字")
    print(f"模型：{sum(p.numel() for p in parts['model'].parameters()):,} 个参数，{config.n_layer} 层，{config.n_head} 个头，"
          f"{config.n_embd} 维，block_size {config.block_size}；在 {DEVICE} 上训练", flush=True)

    probe = HERE / "probe"  # 先试写一个小文件：文件夹不能写，现在就说，不等训练了几分钟再说
    save({}, probe)
    probe.unlink()
    # 这些和存档里的不一样，就不能接着训练
    recipe = {name: globals()[name] for name in RECIPE} | asdict(config) | {"训练用的字数": n_train}
    progress = {"step": 0, "seconds": 0.0, "history": [], "best": None, "saved": 0}
    if RESUME:
        progress = load_snapshot(parts, recipe)
        progress["saved"] = progress["step"]
        print(f"从第 {progress['step']} 步的存档接着训练", flush=True)
    elif SNAPSHOT.exists():
        print(f"注意：上一次训练留下了存档 {SNAPSHOT.name}，这次从头训练，到第 {min(EVAL_EVERY, MAX_STEPS)} 步会覆盖它。"
              "想接着上一次的训练，现在按 Ctrl-C，把 RESUME 改成 True", flush=True)
    try:
        train(parts, progress, recipe, training, validation, tokenizer)
        best_step, best_loss = min(progress["history"], key=lambda item: item[1])
        facts = {"val_loss": best_loss, "step": best_step, "max_steps": MAX_STEPS, "seed": SEED,
                 "minutes": progress["seconds"] / 60, "torch": torch.__version__.split("+")[0]}
        save({"model": progress["best"], "config": asdict(config), "chars": tokenizer.chars, "training": facts}, CKPT)
        SNAPSHOT.unlink(missing_ok=True)
    except KeyboardInterrupt:
        again = (f"把 RESUME 改成 True 再运行，就从第 {progress['saved']} 步的存档接着训练" if progress["saved"]
                 else "这次还没有存档，再运行就从头开始")
        sys.exit(f"\n训练停在第 {progress['step']} 步，原来的 ckpt.pt 没有动；{again}。")
    print("验证损失的变化：", *chart(progress["history"]), sep="\n")
    print(f"训练用了 {clock(progress['seconds'])}，最好的是第 {best_step} 步，验证损失 {best_loss:.4f} nat/字，已写进 {CKPT}")


if __name__ == "__main__":
    start_script()
    main()
