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

STEPS = 40  # 训练的每种写法量几步
ROUNDS = 5  # 生成的每种长度量几次


def plain_step(parts, data, step):
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


def setup(fused):
    train.DEVICE = "cpu"
    parts = train.new_training(gpt.GPTConfig())
    if not fused:
        parts["optimizer"] = torch.optim.AdamW(parts["model"].parameters(), lr=1e-3, fused=False)
    return parts


def peak_memory(name):
    """在新的进程里跑几步，返回内存的最高值（MB）；Windows 上没有 resource，返回 None。"""
    code = (f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import bench, resource, torch; torch.manual_seed(0);"
            f"run, parts = bench.{name}, bench.setup({name == 'ours'}); data = torch.randint(6289, (10**6,));"
            "[run(parts, data, step) for step in range(1, 6)];"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return round(float(done.stdout)) if done.returncode == 0 else None


def ours(parts, data, step):
    train.train_step(parts, data, step)


def bench_training():
    torch.manual_seed(0)
    data = torch.randint(6289, (10**6,))
    runs = {"朴素的写法": (plain_step, setup(False), 16), "train.py": (ours, setup(True), train.BATCH_SIZE)}
    times = {name: [] for name in runs}
    for step in range(1, STEPS + 4):
        for name, (run, parts, _) in runs.items():
            began = time.perf_counter()
            run(parts, data, step)
            if step > 3:  # 前几步是预热
                times[name].append(time.perf_counter() - began)
    speed = {name: runs[name][2] * 128 / statistics.median(t) for name, t in times.items()}
    print("| 训练 | 字/秒 | 比值 | 内存最高 |\n|---|---|---|---|")
    for name, function in (("朴素的写法", "plain_step"), ("train.py", "ours")):
        memory = peak_memory(function)
        print(f"| {name} | {speed[name]:,.0f} | {speed[name] / speed['朴素的写法']:.2f} | {f'{memory} MB' if memory else '—'} |", flush=True)


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
    sys.stdout.reconfigure(encoding="utf-8")
    print(f"PyTorch {torch.__version__}，{torch.get_num_threads()} 个线程，{torch.backends.cpu.get_cpu_capability()}\n")
    bench_training()
    bench_generation()
