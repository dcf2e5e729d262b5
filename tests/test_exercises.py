"""练习和读者常做的改动：在副本里改常量，再运行 generate.py。"""
import re

import pytest

import diff

FAST = {"REPEATS": 1, "LENGTHS": (20,)}


def run(script):
    code, out, error = diff.run(script)
    assert (code, error) == (0, "")
    return out


def sections(out):
    """按横幅分开，list[list[str]]。"""
    return [section.splitlines() for section in re.split(r"\n\n(?===)", out)]


@pytest.fixture(scope="module")
def transcript():
    return sections(diff.read(diff.TRANSCRIPT))


def test_top_p_and_quatrain(edited, transcript):
    out = sections(run(edited("generate.py", TOP_P=0.9, QUATRAIN=True, **FAST)))
    assert out[2][:4] == transcript[2] and out[2][4] == "  温度 1.5，top-p=0.9：" and len(out[2]) == 8
    assert len(set(out[2][5:])) == 3 and all(line.startswith("    ") for line in out[2][5:])
    assert out[4][:3] == transcript[4] and out[4][3] == "  七言绝句（固定格式）：" and len(out[4]) == 7
    assert all(re.fullmatch("    (?:[\u4e00-\u9fff]{7}[，。]){3}[\u4e00-\u9fff]{7}。", line) for line in out[4][4:])
    assert [out[i] for i in (0, 1, 3)] == [transcript[i] for i in (0, 1, 3)]


def test_block_size_512(edited, transcript):
    edited("gpt.py", block_size=512)
    out = sections(run(edited("generate.py", LENGTHS=(32, 500), REPEATS=1)))
    assert out[:5] == transcript[:5]
    assert "随机初始化" in out[5][1] and "512" in out[5][1]
    assert out[5][2] == "  同样的随机种子，写 500 个字：用缓存和不用缓存的结果完全一样"
    assert out[5][-1].endswith("= 4 KB，512 个词元共 2 MB") and len(out[5]) == 6
    assert float(re.search(r"快了 (\S+) 倍", out[5][4])[1]) > 2


def test_block_size_512_after_training(edited):
    """缩成一层、训练 4 步：检查点是 512 的，第 6 节用的就是它。"""
    edited("gpt.py", block_size=512, n_layer=1, n_embd=16)
    run(edited("train.py", MAX_STEPS=4, EVAL_EVERY=2, BATCH_SIZE=1, WARMUP_STEPS=1))
    out = sections(run(edited("generate.py", LENGTHS=(200,), REPEATS=1, N_POEMS=1)))
    assert len(out[5]) == 4 and "写 200 个字：用缓存和不用缓存的结果完全一样" in out[5][1]
    assert out[5][3].endswith("2 × 1 层 × 16 维 × 4 字节 = 0.125 KB，512 个词元共 64 KB")


def test_lengths_beyond_block_size(edited):
    out = sections(run(edited("generate.py", LENGTHS=(140, 20), REPEATS=1, N_POEMS=1)))
    assert "写 140 个字：用缓存和不用缓存的结果完全一样" in out[5][1]
    assert "超过 block_size（128）" in out[5][4] and "省不了" in out[5][4] and len(out[5]) == 6


def test_empty_tuples_print_only_the_banners(edited):
    out = run(edited("generate.py", PROMPTS=(), TEMPERATURES=(), OPENINGS=(), HEADS=(), LENGTHS=(), N_POEMS=1))
    assert [len(section) for section in sections(out)] == [1, 1, 2, 1, 1, 1]


def test_other_values(edited, transcript):
    out = sections(run(edited("generate.py", TEMPERATURES=(0, 0.5), TOP_K=1, N_POEMS=2, SEED=12345, OPENINGS=("春", "明月几时有，把酒"),
                              HEADS=(("山", 5), ("一二三四五六七八九十百千", 7)), PROMPTS=("\n", "一" * 200), **FAST)))
    assert out[1][0] == "== 2. 同样的随机种子，两个温度各写 2 首" and out[1][1] == "  温度 0：" and out[1][2] == out[1][3]
    assert out[1][4] == "  温度 0.5：" and out[1][5] != out[1][6]
    assert out[2][0].endswith("最高的 1 个字里选（top-k=1）") and out[2][1] == out[2][2] == out[1][2]
    assert out[3][1].startswith("    春") and out[3][2].startswith("    明月几时有，把酒")
    assert out[4][2][4::8][:12] == "一二三四五六七八九十百千"
    assert len(out[0]) == 3 and "「⏎」→" in out[0][1]


def test_many_poems_and_a_top_k_above_the_vocabulary(edited):
    out = sections(run(edited("generate.py", N_POEMS=20, TOP_K=100000, TEMPERATURES=(1.5,), **FAST)))
    assert out[2][1:] == out[1][2:] and len(out[2]) == 21  # 全部的字都可选，就和不限制一样
