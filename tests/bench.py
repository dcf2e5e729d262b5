"""量速度：python tests/bench.py，大约两分钟。

训练：train.py 的一步，和照最朴素的写法（16 段一批、逐段切片再叠起来、AdamW 不融合）的一步，交替着量。
生成：用缓存和不用缓存，交替着量，每个字几毫秒；最后一行是 block_size 512、随机初始化的模型。
机器忙闲不定，所以只看中位数和同一次运行里的比值。
"""
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import gpt  # noqa: E402
import train  # noqa: E402

STEPS = 15  # 每一轮，训练的每种写法量几步
ROUNDS = 5  # 交替着量几轮


def plain_step(parts, data, poem_starts, step):
    """最朴素的一步，和 train.train_step 的用法一样。"""
    model, _, optimizer = parts.values()
    block_size = model.config.block_size
    starts = torch.randint(len(data) - block_size, (16,))
    x = torch.stack([data[i:i + block_size] for i in starts])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in starts])
    model.train()
    loss = model(x, y)[1]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def measure_training(way):
    """在这个进程里训练几步，打印每秒几个字，和内存的最高值（MB）。"""
    train.DEVICE = "cpu"
    if way == "ours":
        train.keep_memory()
    parts, data, poem_starts = train.new_training(gpt.GPTConfig()), torch.randint(6289, (10**6,)), torch.arange(10**5)
    step_function, n_windows = train.train_step, train.BATCH_SIZE
    if way == "plain":
        step_function, n_windows = plain_step, 16
        parts["optimizer"] = torch.optim.AdamW(parts["model"].parameters(), lr=1e-3, fused=False)
    times = []
    for step in range(1, STEPS + 4):  # 前 3 步是预热
        began = time.perf_counter()
        step_function(parts, data, poem_starts, step)
        times.append(time.perf_counter() - began)
    try:
        import resource
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
    except ImportError:  # Windows 没有 resource
        memory = 0
    print(n_windows * 128 / statistics.median(times[3:]), memory)


def bench_training():
    results = {"plain": [], "ours": []}
    for _ in range(ROUNDS):
        for way, rows in results.items():  # 各用一个新进程，分配器的设置才不会互相影响
            done = subprocess.run([sys.executable, __file__, way], capture_output=True, text=True, check=True)
            rows.append([float(x) for x in done.stdout.split()])
    speed = {way: statistics.median(row[0] for row in rows) for way, rows in results.items()}
    print("| 训练 | 字/秒 | 比值 | 内存最高 |\n|---|---|---|---|")
    for way, name in (("plain", "朴素的写法"), ("ours", "train.py")):
        memory = max(row[1] for row in results[way])
        print(f"| {name} | {speed[way]:,.0f} | {speed[way] / speed['plain']:.2f} | {f'{memory:.0f} MB' if memory else '—'} |", flush=True)


def bench_generation():
    print("\n| 生成 | 不用缓存，毫秒/字 | 用缓存，毫秒/字 | 比值 |\n|---|---|---|---|")
    for n, block_size in ((32, 128), (64, 128), (120, 128), (500, 512)):
        torch.manual_seed(0)
        model = gpt.GPT(replace(gpt.GPTConfig(), block_size=block_size))
        times = {False: [], True: []}
        for i in range(ROUNDS + 1):
            for use_cache in times:
                began = time.perf_counter()
                model.generate(torch.zeros(1, 1, dtype=torch.long), n, use_cache=use_cache)
                if i > 0:
                    times[use_cache].append((time.perf_counter() - began) / n * 1000)
        slow, fast = (statistics.median(t) for t in times.values())
        print(f"| {n} 个字，block_size {block_size} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_training(sys.argv[1])
        sys.exit()
    sys.stdout.reconfigure(encoding="utf-8")
    print(f"PyTorch {torch.__version__}，{torch.get_num_threads()} 个线程，{torch.backends.cpu.get_cpu_capability()}\n")
    bench_training()
    bench_generation()
