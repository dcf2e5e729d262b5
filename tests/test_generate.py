"""generate.py 打印的六节：格式和课文一样，内容和记录一样；代码和课文引的一样。"""
import inspect
import io
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch

import diff
import generate
import gpt
from conftest import COPY, ROOT, shipped
from test_exercises import find_fault, judge_quatrain, make_poem, prefer, recite, write_quatrain

pytestmark = shipped

HAN = "[\u4e00-\u9fff]"
TIMES = re.compile(r"  写 [ \d]{2}\d 个字：不用缓存 [ \d]{5}\d 毫秒，用缓存 [ \d]{4}\d 毫秒，快了 \d+\.\d 倍")
LESSON = (ROOT / "tests" / "lesson.txt").read_text(encoding="utf-8")
TRANSCRIPT = (ROOT / "tests" / "transcript.txt").read_text(encoding="utf-8")

# 课文引的代码，一段一段照抄；torch.multinomial 在代码里是 gpt.py 的 multinomial
QUOTED_IN_GPT = ["""
logits = logits[:, -1, :] / temperature
""", """
next_id = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
""", """
if top_k is not None:
""", """
    kth = torch.topk(logits, top_k).values[:, -1:]
    logits = logits.masked_fill(logits < kth, float("-inf"))
""", """
logits, _ = self(idx)  # 不用缓存：每一步都把整段序列从头算一遍
""", """
if cache is not None:  # KV 缓存：把之前算过的 K、V 接在前面，不用重算
    if "k" in cache:
        k = torch.cat([cache["k"], k], dim=2)
        v = torch.cat([cache["v"], v], dim=2)
    cache["k"], cache["v"] = k, v
""", """
total = k.size(2)
mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)
""", """
if use_cache:
    # 第一步把整段提示词送进去；之后每步只送最新的一个词元，前面的 K、V 从缓存里取
    logits, _ = self(idx[:, start:], caches=caches, start=start)
    start = idx.size(1)
"""]
ACROSTIC = '''@torch.no_grad()
def acrostic(heads, n_char=7, temperature=0.8):
    ids = encode("\\n")
    for i, head in enumerate(heads):
        ids = torch.cat([ids, encode(head)], dim=1)  # 先把指定的字放进去
        for _ in range(n_char - 1):  # 再让模型一个字一个字地写完这一句
            logits = model(ids)[0][0, -1] / temperature
            logits[BANNED] = float("-inf")
            next_id = torch.multinomial(F.softmax(logits, dim=-1), 1)
            ids = torch.cat([ids, next_id[None]], dim=1)
        ids = torch.cat([ids, encode("，。"[i % 2])], dim=1)  # 标点由我们加，保证格式
    return decode(ids[0].tolist()).strip()
'''


@pytest.fixture(scope="module")
def output():
    """在别处运行的 generate.py：一个线程，从另一个文件夹，终端的编码是 GBK。"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONIOENCODING": "gbk"}
    done = subprocess.run([sys.executable, COPY / "generate.py"], cwd=ROOT.parent, env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode("utf-8").replace("\r\n", "\n")


def test_same_as_the_transcript(output):
    assert diff.diff(TRANSCRIPT, output, "transcript.txt") == []


def test_same_text_on_other_machines(lesson):
    """两个线程，没有向量指令，终端的编码是 ASCII，文件夹的名字里有汉字和空格，没有语料。"""
    (lesson.folder / "data" / "poems.txt").unlink()
    code, out, error = lesson.run("generate.py", OMP_NUM_THREADS="2", ATEN_CPU_CAPABILITY="default", PYTHONIOENCODING="ascii",
                                  PYTHONUTF8="0")
    assert (code, error) == (0, "") and diff.diff(TRANSCRIPT, out, "transcript.txt") == []


def shape(text):
    """把课文和输出都变成只剩格式的样子：诗、概率、时间换成记号，连着几首诗算一行。"""
    lines = [re.sub("^    .+", "    诗", line) for line in text.splitlines()]
    lines = [re.sub(r"\S \d+\.\d%", "字 0.0%", line) for line in lines]
    lines = ["  计时" if TIMES.fullmatch(line) else line for line in lines]
    return [line for line, _ in itertools.groupby(lines)]


def test_form_is_that_of_the_lesson(output):
    assert sum("计时" in line for line in shape(LESSON)) == 1  # 三行计时都认出来了
    assert shape(output) == shape(LESSON)
    assert output.endswith("KB\n") and "\n\n\n" not in output
    poems = [line[4:] for line in output.splitlines() if line.startswith("    ")]
    assert len(poems) == 3 * 3 + 3 + 3 + 2
    assert all(re.fullmatch(f"(?:{HAN}|[，。]){{1,80}}|(?:{HAN}|[，。]){{80}}……", poem) for poem in poems)


def test_the_lesson_s_code_stands_in_the_code():
    source = "\n".join(line.strip() for line in inspect.getsource(gpt).splitlines())
    for quoted in QUOTED_IN_GPT:
        quoted = "\n" + "\n".join(line.strip() for line in quoted.strip().splitlines()) + "\n"
        assert quoted.replace("torch.multinomial", "multinomial") in source, quoted
    assert inspect.getsource(generate.acrostic) == ACROSTIC.replace("torch.multinomial", "multinomial")


def test_files_read_like_the_lesson():
    """gpt.py 里只有模型；答案在最后；每一节都说看什么。"""
    assert set(re.findall(r"^(?:import|from) (\w+)", inspect.getsource(gpt), re.M)) == {
        "math", "contextlib", "dataclasses", "numbers", "torch"}
    sections = [generate.probabilities, generate.temperatures, generate.filters, generate.openings, generate.acrostics,
                generate.kv_cache]
    assert all(section.__doc__ for section in sections)
    lines = [inspect.getsourcelines(section)[1] for section in (*sections, generate.main)]
    assert lines == sorted(lines)


def test_the_eight_likeliest_characters_are_computed(output):
    for line, prompt in zip(output.splitlines()[1:4], generate.PROMPTS):
        with torch.no_grad():
            probs = torch.softmax(generate.model(generate.encode(prompt))[0][0, -1].double(), 0)
        words = re.findall(r"(\S) (\d+\.\d)%", line)
        assert line.startswith(f"  「{prompt}」→ ") and len(words) == 8
        best = probs.topk(8).indices.tolist()
        assert [ch for ch, _ in words] == list(generate.decode(best))
        assert all(abs(float(p) - 100 * probs[i]) < 0.06 for (_, p), i in zip(words, best))


def test_importing_prints_nothing_and_gives_the_lesson_s_names():
    code = ("import generate as g, torch; assert torch.get_num_threads() == 1 and not torch.backends.mkldnn.enabled;"
            " assert g.decode(g.encode('春风')[0].tolist()) == '春风' and g.encode('春风').shape == (1, 2);"
            "assert g.decode(g.BANNED) == '\\n，。' and not g.model.training; g.acrostic('春')")
    done = subprocess.run([sys.executable, "-c", code], cwd=COPY, env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_cache_holds_the_bytes_that_are_printed(output):
    caches = [{} for _ in range(4)]
    with torch.no_grad():
        generate.model(generate.encode("\n" + "春" * 127), caches=caches)
    held = sum(tensor.nbytes for cache in caches for tensor in cache.values())
    assert held == 2 * 4 * 128 * 4 * 128 == 512 * 1024
    assert output.splitlines()[-1] == "  这个模型每个词元的缓存：2 × 4 层 × 128 维 × 4 字节 = 4 KB，128 个词元共 512 KB"


def test_the_verdict_comes_from_comparing(lesson):
    """缓存写错了（新字都排在第 0 个位置），就说不一样。"""
    lesson.replace("gpt.py", "self.wpe.weight[start:end]", "self.wpe.weight[:idx.size(1)]")
    lesson.edit("generate.py", LENGTHS=(40,), N_POEMS=1)
    code, out, _ = lesson.run_here("generate.py")
    where = re.search(r"写 40 个字：用缓存和不用缓存的结果不一样，从第 (\d+) 个字开始\n", out)
    assert code == 0 and 2 <= int(where[1]) <= 40


def test_a_poem_that_does_not_end_is_cut_at_80_characters(monkeypatch):
    monkeypatch.setattr(generate, "model", prefer(generate.model, [generate.NEWLINE], -60.0))
    for opening in ("", "春风"):
        text = generate.write_poem(opening)
        assert len(text) == 82 and text.startswith(opening) and text.endswith("……")


def test_top_p_reaches_the_model():
    torch.manual_seed(0)
    assert generate.write_poem("", 1.5, None, 1e-9) == generate.write_poem("", 0)  # 只留概率最高的一个字


def test_top_p_stands_alone_beside_top_k(monkeypatch):
    calls = []
    monkeypatch.setattr(generate, "show", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(generate, "TOP_P", 0.9)
    generate.filters()
    write = generate.write_poem
    assert calls == [(3, write, "", 1.5, 20), (3, write, "", 1.5, None, 0.9)]


def test_the_first_difference_is_counted_from_1():
    assert generate.compare([5, 6, 7], [5, 6, 7]) == "完全一样"
    assert generate.compare([5, 6, 7], [5, 9, 7]) == "不一样，从第 2 个字开始"


def test_the_cache_is_faster():
    ratios = [generate.time_generate(generate.model, 120, False)[1] / generate.time_generate(generate.model, 120, True)[1] for _ in range(3)]
    assert max(ratios) > 1.2


@pytest.mark.parametrize("heads, n_char", [("春", 5), ("春眠不觉", 7), ("学无止境", 5), ("一二三四五六七八九十百千", 7)])
def test_acrostic(heads, n_char):
    for temperature in (0.1, 0.8, 5):
        torch.manual_seed(0)
        lines = re.split("(?<=[，。])", generate.acrostic(heads, n_char, temperature))[:-1]
        assert [line[0] for line in lines] == list(heads)
        assert all(re.fullmatch(f"{HAN}{{{n_char}}}{'，。'[i % 2]}", line) for i, line in enumerate(lines))


def test_quatrain_never_breaks_its_form():
    """任何正确的答案都过得去。"""
    for seed in range(10):
        torch.manual_seed(seed)
        assert find_fault(generate.quatrain(), "。") == (), seed
    assert judge_quatrain(generate) == ""


@pytest.mark.skipif("第八个字符只许是标点" not in (generate.quatrain.__doc__ or ""),
                    reason="练习 2 已经是你自己的答案，由 test_exercises.py 来看")
def test_quatrain_lets_the_model_choose_between_comma_and_stop():
    comma = generate.tokenizer.ids["，"]
    text, _ = write_quatrain(generate, prefer(generate.model, [comma], 60.0))
    assert text[7::8] == "，，，。"  # 全诗的最后只能是句号
    poem = make_poem(generate)
    text, _ = write_quatrain(generate, recite(generate.model, generate.tokenizer.encode(poem + "\n")))
    assert text.rstrip("。") == poem.rstrip("。")


def test_the_times_are_medians_of_alternating_runs(monkeypatch, capsys):
    plain, cached, order = iter([0, 30, 60, 300]), iter([0, 10, 20, 90]), []

    def time_generate(net, n, use_cache):
        order.append(use_cache)
        return [1] * n, next(cached if use_cache else plain)
    monkeypatch.setattr(generate, "time_generate", time_generate)
    monkeypatch.setattr(generate, "LENGTHS", (128,))
    generate.kv_cache()
    out = capsys.readouterr().out
    assert "不用缓存     60 毫秒，用缓存    20 毫秒，快了 3.0 倍" in out
    assert "超过" not in out  # 正好写满 block_size 个字，窗口还没有滑
    assert order == [False, True] * 4


class IdleStream(io.TextIOBase):
    """IDLE 的输出流：没有 reconfigure，isatty() 却是真的。"""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def isatty(self):
        return True

    def getvalue(self):
        return self.text


@pytest.mark.parametrize("stream", [IdleStream, lambda: io.StringIO(), lambda: open(os.devnull, "w", encoding="utf-8")])
def test_idle_notebooks_and_no_output_at_all(small, stream):
    small.write("ckpt.pt", (ROOT / "ckpt.pt").read_bytes())
    small.edit("generate.py", LENGTHS=(8,), N_POEMS=1, TEMPERATURES=(1.0,))
    out = stream()
    for script in ("generate.py", "train.py"):
        code, _, error = small.run_here(script, stdout=out)
        assert (code, error) == (0, "")
    if hasattr(out, "getvalue"):
        assert out.getvalue().count("==") == 6 and out.getvalue().count("第 12/12 步") == 1 and "\r" not in out.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="要用 POSIX 的文件描述符")
def test_output_that_cannot_be_written(small):
    """标准输出关了（>&-）照常；写满了的磁盘（/dev/full）、先结束的 head：一句话，退出码 1。"""
    small.write("ckpt.pt", (ROOT / "ckpt.pt").read_bytes())
    small.edit("generate.py", LENGTHS=(), N_POEMS=1, TEMPERATURES=(), PROMPTS=(), OPENINGS=(), HEADS=())  # 打印得少，最后才写出去
    (small.folder / "quantangshi").mkdir()
    small.write("quantangshi/poet.tang.0.json", b"[]")
    generating, training, preparing = (f'"{sys.executable}" "{path}"' for path in (
        small.folder / "generate.py", small.folder / "train.py", COPY / "data" / "prepare.py"))
    preparing += f' "{small.folder}"'
    for command, code, words in ((f"{generating} >&-", 0, ""), (f"{generating} > /dev/full", 1, "磁盘满了"),
                                 (f"set -o pipefail; {generating} | true", 1, "先结束了"),
                                 (f"{training} > /dev/full", 1, "磁盘满了"), (f"{preparing} > /dev/full", 1, "磁盘满了"),
                                 (f"{preparing} >&-", 1, "《全唐诗》应有 57,607 首")):
        if "/dev/full" in command and not os.path.exists("/dev/full"):  # macOS 没有
            continue
        done = subprocess.run(["bash", "-c", command], capture_output=True)
        error = done.stderr.decode("utf-8")
        assert done.returncode == code and words in error and len(error.splitlines()) == bool(words), error
