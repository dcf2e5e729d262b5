"""课文对模型的说法，对课程自带的 ckpt.pt 都成立（SEED 就是按其中几条挑的）。"""
import random
import re
from collections import Counter

import pytest
import torch

import generate
import train
from conftest import ROOT

TEXT = (ROOT / "data" / "poems.txt").read_text(encoding="utf-8")
COMMON = {ch for ch, _ in Counter(TEXT).most_common(3000)}
REGULAR = re.compile("|".join(f"(?:[\u4e00-\u9fff]{{{n}}}，[\u4e00-\u9fff]{{{n}}}。){{{k}}}" for n in (5, 7) for k in (2, 4)))


def regular(poem):
    return bool(REGULAR.fullmatch(poem))


def n_rare(poem):
    return sum(ch not in COMMON for ch in poem.replace("…", ""))


def poems(seed, temperature, top_k=None):
    torch.manual_seed(seed)
    return [generate.write_poem("", temperature, top_k) for _ in range(3)]


def continued(seed, opening):
    torch.manual_seed(seed)
    return generate.write_poem(opening, generate.OPENING_TEMPERATURE)


# 说法 3 到 5，一条一个函数：种子 -> 是否成立
SEED_CLAIMS = {
    "温度 0.3：三首都合格律，没有生僻字": lambda seed: all(regular(p) and not n_rare(p) for p in poems(seed, 0.3)),
    "温度 1.0：三首都合格律，有生僻字": lambda seed: all(map(regular, ps := poems(seed, 1.0))) and sum(map(n_rare, ps)) >= 1,
    "温度 1.5：有一首格式崩了，生僻字至少五个": lambda seed: not all(map(regular, ps := poems(seed, 1.5))) and sum(map(n_rare, ps)) >= 5,
    "温度 1.5 加 top-k=20：格式恢复，没有生僻字": lambda seed: all(regular(p) and not n_rare(p) for p in poems(seed, 1.5, 20)),
    "大漠孤烟直：五言八句": lambda seed: regular(p := continued(seed, "大漠孤烟直，")) and len(p) == 48,
    "人工智能：合格律": lambda seed: regular(continued(seed, "人工智能"))}


def holds(seed):
    return all(claim(seed) for claim in SEED_CLAIMS.values())


@pytest.mark.parametrize("claim", SEED_CLAIMS)
def test_seed_claims(claim):
    assert SEED_CLAIMS[claim](generate.SEED)


def test_seed_is_the_smallest_for_which_they_hold():
    assert not any(map(holds, range(1, generate.SEED)))


def next_probs(prompt):
    with torch.no_grad():
        return torch.softmax(generate.model(generate.encode(prompt))[0][0, -1], 0)


def test_full_stop_after_spring_wind():
    probs = next_probs("春风")
    stop = probs[generate.tokenizer.ids["。"]].item()
    assert probs.max().item() == stop and 0.12 <= stop <= 0.16
    assert abs(stop - TEXT.count("春风。") / TEXT.count("春风")) < 0.015


@pytest.mark.parametrize("prompt, ch", [("白日依山尽，黄河入海", "流"), ("床前明月光，疑是地上", "霜")])
def test_the_original_is_not_among_the_8_most_likely(prompt, ch):
    assert ch not in generate.decode(next_probs(prompt).topk(8).indices.tolist())


def test_the_model_does_not_recite():
    training, _ = train.split(TEXT.split())
    sample = random.Random(0).sample(training, 200)
    exact = 0
    for length in {len(poem) for poem in sample}:
        batch = [poem for poem in sample if len(poem) == length]
        prompts = torch.cat([generate.encode("\n" + poem[:length // 2]) for poem in batch])
        texts = generate.model.generate(prompts, length - length // 2, temperature=0)
        exact += sum(generate.decode(ids.tolist()) == "\n" + poem for ids, poem in zip(texts, batch))
    assert exact / len(sample) < 0.02


def test_validation_loss_is_what_the_checkpoint_says():
    facts = generate.load_checkpoint(ROOT / "ckpt.pt")[2]
    _, validation = train.split(TEXT.split())
    loss = train.evaluate(generate.model, validation, generate.tokenizer)
    assert loss == pytest.approx(facts["val_loss"], abs=1e-3) and loss <= 4.30
    assert f"{facts['val_loss']:.4f}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert facts["seed"] == train.SEED and facts["max_steps"] == train.MAX_STEPS
