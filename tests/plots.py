"""画 README 里的两张图：python tests/plots.py。要先装 matplotlib：python -m pip install matplotlib。

    tests/plots/temperature.svg   温度、长尾、top-k、top-p：概率最高的 n 个字，一共占多少
    tests/plots/kv_cache.svg      用缓存和不用缓存，写第 n 个字要几毫秒
"""
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from diff import run  # noqa: E402
from generate import TEMPERATURES, encode, model  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402

TOP_K, TOP_P = 20, 0.9
COLOURS = ("#0072b2", "#d55e00", "#009e73")


def curves():
    """读完「春风」，每个温度一项：(温度, 总和, 前 20 名占多少, 加到 0.9 要几个字)。

    总和：(vocab_size,)，第 n 个数是概率最高的 n 个字一共占多少。
    """
    with torch.no_grad():
        logits = model(encode("春风"))[0][0, -1]
    rows = []
    for temperature in TEMPERATURES:
        probs = F.softmax(logits / temperature, dim=-1).sort(descending=True).values
        total = probs.cumsum(0)
        rows.append((temperature, total, total[TOP_K - 1].item(), (total < TOP_P).sum().item() + 1))
    return rows


def new_figure():
    """一张白底的图；文字还是文字，用读者机器上的中文字体。"""
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tang", "font.size": 11,
                         "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.5), facecolor="white")
    return figure, axes


def write(figure, name):
    """存成 SVG，换上一串中文字体；没有日期，同样的图就是同样的字节。"""
    import io
    import re
    import warnings
    buffer = io.StringIO()
    warnings.filterwarnings("ignore", "Glyph")  # matplotlib 自己的字体里没有汉字，图里用不着它
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    fonts = "'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', 'WenQuanYi Zen Hei', sans-serif"
    text = re.sub("font-family: [^;\"]+", f"font-family: {fonts}", buffer.getvalue())
    text = re.sub(r"[ \t]+\n", "\n", text)
    (HERE / "plots" / name).write_text(text, encoding="utf-8", newline="\n")


def plot_temperature():
    figure, axes = new_figure()
    axes.axvline(TOP_K, color="#888888", linestyle="--", linewidth=1)
    axes.axhline(TOP_P, color="#888888", linestyle=":", linewidth=1)
    axes.text(TOP_K * 1.05, 0.02, f"top-k = {TOP_K}")
    axes.text(6289, TOP_P + 0.015, f"top-p = {TOP_P}", ha="right")
    for (temperature, total, share, n), colour in zip(curves(), COLOURS):
        ranks = sorted({round(10 ** (i / 40)) for i in range(153)} | {1, TOP_K, n, len(total)})
        ranks = [rank for rank in ranks if rank <= len(total)]
        heights = [total[rank - 1].item() for rank in ranks]
        axes.plot(ranks, heights, color=colour, label=f"温度 {temperature}")
        near = {"textcoords": "offset points", "color": colour}
        for x, label, place in ((TOP_K, f"{share:.1%}", {"xytext": (-6, 6), "ha": "right"}),
                                (n, f"{n:,} 个", {"xytext": (5, -14)})):
            point = (x, total[x - 1].item())
            axes.plot(*point, "o", color=colour)
            axes.annotate(label, point, **place, **near)
    axes.set_xscale("log")
    axes.set_xlim(1, 6600)
    axes.set_ylim(0, 1.05)
    axes.set_xticks([1, 10, 100, 1000, 6289], ["1", "10", "100", "1,000", "6,289"])
    axes.minorticks_off()
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("概率最高的 n 个字")
    axes.set_ylabel("一共占多少概率")
    axes.set_title("读完「春风」，下一个字的概率：温度越高，长尾越重")
    axes.legend(loc="center right", frameon=False)
    write(figure, "temperature.svg")


@torch.inference_mode()
def milliseconds(net, n, use_cache):
    """写第 1 到第 n 个字，各用几毫秒（只量模型，不算抽签）。"""
    ids, caches, times = torch.zeros(1, n, dtype=torch.long), [{} for _ in net.blocks], []
    for t in range(n):
        began = time.perf_counter()
        if use_cache:
            net(ids[:, t:t + 1], caches=caches, start=t)
        else:
            net(ids[:, :t + 1])
        times.append((time.perf_counter() - began) * 1000)
    return times


def plot_kv_cache():
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=512)).eval()
    figure, axes = new_figure()
    runs = {False: [], True: []}
    for _ in range(5):  # 交替着量，每个字取中位数
        for use_cache in runs:
            runs[use_cache].append(milliseconds(net, 500, use_cache))
    for use_cache, colour, label in ((False, COLOURS[1], "不用缓存"), (True, COLOURS[0], "用缓存")):
        medians = torch.tensor(runs[use_cache]).median(0).values
        smooth = medians.view(-1, 10).median(1).values.tolist()  # 每 10 个字一点
        axes.plot(range(5, 500, 10), smooth, color=colour, label=label)
    axes.set_xlim(0, 500)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("写第 n 个字")
    axes.set_ylabel("毫秒")
    axes.set_title(f"block_size 512，一个线程，{torch.backends.cpu.get_cpu_capability()} 的 CPU，"
                   f"torch {torch.__version__}")
    axes.legend(frameon=False)
    write(figure, "kv_cache.svg")


def main():
    plot_temperature()
    plot_kv_cache()
    print(f"画好了 {HERE / 'plots'} 里的两张图")


if __name__ == "__main__":
    run(main)
