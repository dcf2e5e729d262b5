"""generate.py 打印的六节：格式和课文一样，内容和记录一样；藏头诗和绝句的格式。"""
import itertools
import re
import subprocess
import sys

import pytest
import torch

import diff
from conftest import ROOT

HAN = "[\u4e00-\u9fff]"
TIMES = re.compile(r"  写 [ \d]{2}\d 个字：不用缓存 [ \d]{5}\d 毫秒，用缓存 [ \d]{4}\d 毫秒，快了 \d+\.\d 倍")


@pytest.fixture(scope="module")
def output():
    code, out, error = diff.run()
    assert (code, error) == (0, "")
    return out


def test_same_as_the_transcript(output):
    assert diff.diff(diff.read(diff.TRANSCRIPT), output, "transcript.txt") == []


def test_readme_shows_the_transcript():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert diff.read(diff.TRANSCRIPT).strip() in readme


def shape(text):
    """把课文和输出都变成只剩格式的样子：诗、概率、时间换成记号，连着几首诗算一行。"""
    lines = [re.sub("^    .+", "    诗", line) for line in text.splitlines()]
    lines = [re.sub(r"\S \d+\.\d%", "字 0.0%", line) for line in lines]
    lines = ["  计时" if TIMES.fullmatch(line) else line for line in lines]
    return [line for line, _ in itertools.groupby(lines)]


def test_form_is_that_of_the_lesson(output):
    lesson = diff.read(ROOT / "tests" / "lesson.txt")
    assert sum("计时" in line for line in shape(lesson)) == 1  # 三行计时都认出来了
    assert shape(output) == shape(lesson)
    assert output.endswith("KB\n") and "\n\n\n" not in output


def test_a_poem_is_one_line_of_at_most_80_characters(output):
    poems = [line[4:] for line in output.splitlines() if line.startswith("    ")]
    assert len(poems) == 3 * 3 + 3 + 3 + 2
    assert all(re.fullmatch(f"(?:{HAN}|[，。]){{1,80}}|(?:{HAN}|[，。]){{80}}……", poem) for poem in poems)


def test_the_eight_likeliest_characters_are_computed(output):
    import generate
    for line, prompt in zip(output.splitlines()[1:4], generate.PROMPTS):
        with torch.no_grad():
            probs = torch.softmax(generate.model(generate.encode(prompt))[0][0, -1].double(), 0)
        words = re.findall(r"(\S) (\d+\.\d)%", line)
        assert line.startswith(f"  「{prompt}」→ ") and len(words) == 8
        best = probs.topk(8).indices.tolist()
        assert [ch for ch, _ in words] == list(generate.decode(best))
        assert all(abs(float(p) - 100 * probs[i]) < 0.06 for (_, p), i in zip(words, best))


def test_importing_prints_nothing_and_gives_the_lesson_s_names():
    code = "import generate as g; g.model; g.BANNED; assert g.decode(g.encode('春风')[0].tolist()) == '春风'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_cache_holds_the_bytes_that_are_printed(output):
    import generate
    gpt, caches = generate.model, [{} for _ in range(4)]
    with torch.no_grad():
        gpt(generate.encode("\n" + "春" * 127), caches=caches)
    held = sum(tensor.nbytes for cache in caches for tensor in cache.values())
    assert held == 2 * 4 * 128 * 4 * 128 == 512 * 1024
    assert output.splitlines()[-1] == "  这个模型每个词元的缓存：2 × 4 层 × 128 维 × 4 字节 = 4 KB，128 个词元共 512 KB"


def test_the_verdict_comes_from_comparing(monkeypatch, capsys):
    import generate
    real = generate.timed

    def wrong(gpt, n, use_cache):
        ids, ms = real(gpt, n, use_cache)
        return (ids[:6] + [ids[6] + 1] + ids[7:] if use_cache else ids), ms
    monkeypatch.setattr(generate, "LENGTHS", (20,))
    monkeypatch.setattr(generate, "timed", wrong)
    generate.kv_cache()
    assert "不一样，从第 7 个字开始" in capsys.readouterr().out


def test_the_cache_is_faster():
    import generate
    ratios = [generate.timed(generate.model, 120, False)[1] / generate.timed(generate.model, 120, True)[1] for _ in range(3)]
    assert max(ratios) > 1.2


@pytest.mark.parametrize("temperature", [0, 0.8, 5])
@pytest.mark.parametrize("heads, n_char", [("春", 5), ("春眠不觉", 7), ("学无止境", 5), ("一二三四五六七八九十百千", 7)])
def test_acrostic(heads, n_char, temperature):
    import generate
    torch.manual_seed(0)
    lines = re.split("(?<=[，。])", generate.acrostic(heads, n_char, temperature))[:-1]
    assert [line[0] for line in lines] == list(heads)
    assert all(re.fullmatch(f"{HAN}{{{n_char}}}{'，。'[i % 2]}", line) for i, line in enumerate(lines))


def test_acrostic_longer_than_the_window():
    import generate
    poem = generate.acrostic("春夏秋冬" * 6, 7)
    assert poem[::8] == "春夏秋冬" * 6


@pytest.mark.parametrize("heads", ["", "春，", "，", "春\n眠", "春牀", "A", None, 3])
def test_acrostic_bad_heads(heads):
    import generate
    with pytest.raises(ValueError) as error:
        generate.acrostic(heads)
    assert repr(heads) in str(error.value)


@pytest.mark.parametrize("n_char", [0, -1, 5.5])
def test_acrostic_bad_n_char(n_char):
    import generate
    with pytest.raises(ValueError, match=f"字数.*{n_char}"):
        generate.acrostic("春", n_char)


QUATRAIN = re.compile(f"(?:{HAN}{{7}}[，。]){{3}}{HAN}{{7}}。")


def test_quatrain_never_breaks_its_form():
    import generate
    for seed in range(50):
        torch.manual_seed(seed)
        assert QUATRAIN.fullmatch(generate.quatrain(temperature=1.5)), seed


@pytest.mark.parametrize("temperature", [0, 0.3, 5])
def test_quatrain_at_any_temperature(temperature):
    import generate
    torch.manual_seed(0)
    assert QUATRAIN.fullmatch(generate.quatrain(temperature))
