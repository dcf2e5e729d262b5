"""量速度：python tests/bench.py，两三分钟。

训练：真的运行 train.py 的前几十步，和一个几行的、没有讲究速度的训练循环交替着量。
生成：用缓存和不用缓存，交替着量，每个字几毫秒；最后一行是 block_size 512、随机初始化的模型。
机器忙闲不定，所以只看中位数和同一次运行里的比值。
"""
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import torch  # noqa: E402

from diff import run  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402

STEPS = 40  # 每一轮，训练的每种写法量几步
ROUNDS = 5  # 交替着量几轮


def plain_speed():
    """最朴素的写法，每秒几个字。"""
    model, data = GPT(GPTConfig()), torch.randint(6289, (10**6,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    block_size, began = model.config.block_size, time.perf_counter()
    for _ in range(STEPS):
        starts = torch.randint(len(data) - block_size, (16,))
        x = torch.stack([data[i:i + block_size] for i in starts])
        y = torch.stack([data[i + 1:i + 1 + block_size] for i in starts])
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 16 * block_size * STEPS / (time.perf_counter() - began)


def train_speed(folder):
    """train.py 自己打印的每秒几个字：在临时文件夹里运行 STEPS 步。"""
    for name in ("gpt.py", "tokenizer.py", "train.py", "data/poems.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for constant, value in (("MAX_STEPS", STEPS), ("DECAY_STEPS", 1),
                                ("VAL_FRACTION", 0.001), ("RESUME", False)):
            text = re.sub(rf"^{constant} = .*", f"{constant} = {value}", text, flags=re.M)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    done = subprocess.run([sys.executable, str(folder / "train.py")], capture_output=True)
    if done.returncode:  # train.py 说了什么，照样说出来
        error = done.stderr.decode("utf-8", "replace").strip()
        sys.exit(f"train.py 没有训练完，退出码 {done.returncode}：\n{error}")
    return float(re.findall(r"([\d,]+) 字/秒", done.stdout.decode("utf-8"))[-1].replace(",", ""))


def bench_training():
    speeds = {"朴素的写法": [], "train.py": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1, ROUNDS + 1):
            print(f"训练，第 {i}/{ROUNDS} 轮……", file=sys.stderr, flush=True)
            speeds["朴素的写法"].append(plain_speed())
            speeds["train.py"].append(train_speed(Path(folder)))
    plain = statistics.median(speeds["朴素的写法"])
    print("| 训练 | 字/秒 | 比值 |\n|---|---|---|")
    for name, values in speeds.items():
        speed = statistics.median(values)
        print(f"| {name} | {speed:,.0f} | {speed / plain:.2f} |", flush=True)


def bench_generation():
    print("\n| 生成 | 不用缓存，毫秒/字 | 用缓存，毫秒/字 | 比值 |\n|---|---|---|---|")
    torch.set_num_threads(1)  # 和 generate.py 一样
    torch.backends.mkldnn.enabled = False
    for n, block_size in ((32, 128), (64, 128), (120, 128), (500, 512)):
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=block_size))
        times = {False: [], True: []}
        for i in range(ROUNDS + 1):
            for use_cache in times:
                began = time.perf_counter()
                model.generate(torch.zeros(1, 1, dtype=torch.long), n, use_cache=use_cache)
                if i > 0:
                    times[use_cache].append((time.perf_counter() - began) / n * 1000)
        slow, fast = (statistics.median(t) for t in times.values())
        print(f"| {n} 个字，block_size {block_size} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f} |",
              flush=True)


def main():
    print(f"PyTorch {torch.__version__}，{torch.get_num_threads()} 个线程，"
          f"{torch.backends.cpu.get_cpu_capability()}\n", flush=True)
    bench_training()
    bench_generation()


if __name__ == "__main__":
    run(main)
