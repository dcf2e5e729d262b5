"""README 是门面：命令能用，印的数字是真的。"""
import contextlib
import io
import re
import shlex
import subprocess
import sys

import torch

import diff
import generate
import plots
import train
from conftest import ROOT, shipped

pytestmark = shipped

README = (ROOT / "README.md").read_text(encoding="utf-8")
TRANSCRIPT = (ROOT / "tests" / "transcript.txt").read_text(encoding="utf-8")
FACTS = torch.load(ROOT / "ckpt.pt", weights_only=True)["training"]


def test_short_and_with_the_two_commands():
    lines = README.splitlines()
    assert len(lines) < 150 and re.fullmatch(r"# \S+ GPT：\S+ KV \S+", lines[0])
    assert all(line.isascii() or "「生成文字" in line for line in lines[4:7]) and lines[2].startswith("这是课文")
    assert "    python -m pip install -r requirements.txt && python generate.py" in lines
    assert "    python -m pip install -r requirements.txt pytest && python -m pytest tests" in lines


def test_what_it_shows_is_what_comes_out():
    [shown] = re.findall(r"```text\n(.*?)```", README, re.S)
    first, *_, last = TRANSCRIPT.split("\n\n")
    assert shown.startswith(first + "\n\n") and diff.mask(shown).endswith("\n\n" + diff.mask(last))
    assert not set(diff.mask(shown).splitlines()) - set(diff.mask(TRANSCRIPT).splitlines())
    assert "  温度 0.3：\n" in shown and "  温度 1.5：\n" in shown


def test_the_table_of_temperatures_is_what_its_code_prints():
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), torch.no_grad():
        exec(code, {})
    rows = out.getvalue().strip()
    assert len(rows.splitlines()) == 3 and f"\n{rows}\n" in README


def test_the_commands_that_count_print_what_it_says():
    commands = [shlex.split(line) for line in README.splitlines() if line.startswith("    python -c")]
    first, second = (subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, check=True).stdout
                     for command in commands)
    assert first.decode().strip() == "6289 797 111" and "打印 `6289 797 111`" in README and "举头望山月".encode() in second
    assert "举头望山月" in (ROOT / "data" / "poems.txt").read_text(encoding="utf-8").splitlines()[4219 - 1]


def test_its_figures_are_those_of_the_checkpoint():
    assert f"{FACTS['val_loss']:.4f}" in README and f"{FACTS['openings_loss']:.4f}" in README
    assert f"{train.MAX_STEPS:,} 步" in README and f"| {train.MAX_STEPS:,} | {FACTS['val_loss']:.4f} |" in README
    assert sum(p.numel() for p in generate.model.parameters()) == 2_419_712 and "240 万个参数" in README


def test_the_pictures_show_the_numbers_of_the_shipped_model():
    text = (ROOT / "tests" / "plots" / "temperature.svg").read_text(encoding="utf-8")
    for temperature, _, share, n in plots.curves():
        assert f">温度 {temperature}<" in text and f">{share:.1%}<" in text and f">{n:,} 个<" in text
        assert f"| {share:.1%} |" in README and f"| {n:,} |" in README  # 和表里的一样
    for name in ("temperature.svg", "kv_cache.svg"):
        path = ROOT / "tests" / "plots" / name
        assert f"(tests/plots/{name})" in README and path.stat().st_size < 100_000
        assert "Noto Sans CJK SC" in path.read_text(encoding="utf-8")


def test_no_paragraph_is_too_dense():
    assert all(sum("\u4e00" <= ch <= "\u9fff" for ch in line) <= 160 for line in README.splitlines())
