"""选字：multinomial、top-k、top-p。"""
import math

import pytest
import torch

from gpt import multinomial, outside_top_p, sample


def kept(probs, top_p):
    return (~outside_top_p(torch.tensor([probs]).log(), top_p))[0].tolist()


def test_multinomial_draws_the_exact_probabilities():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    torch.manual_seed(0)
    n = 200_000
    counts = torch.bincount(multinomial(probs.expand(n, 6))[:, 0], minlength=6)
    chi_square = ((counts - n * probs) ** 2 / (n * probs)).sum().item()
    assert chi_square < 20.5  # 自由度 5，超过 20.5 的机会是千分之一


def test_multinomial_golden_picks():
    """随机数的来源和做法一变，课文的诗就全变了。"""
    probs = torch.softmax(torch.arange(1000, dtype=torch.float64) / 200, 0)
    torch.manual_seed(42)
    assert [multinomial(probs).item() for _ in range(8)] == [822, 700, 587, 983, 735, 739, 987, 280]


def test_multinomial_shapes():
    assert multinomial(torch.ones(7)).shape == (1,)
    assert multinomial(torch.ones(3, 7)).shape == (3, 1)
    picks = multinomial(torch.ones(3, 7), 7)
    assert picks.sort().values.tolist() == [list(range(7))] * 3  # 不放回
    assert multinomial(torch.tensor([0.0, 0.0, 2.0])).item() == 2  # 不必加起来等于 1


@pytest.mark.parametrize("probs, num_samples", [
    ([0.0, 0.0], 1), ([0.5, -0.1], 1), ([math.nan, 1.0], 1), ([math.inf, 1.0], 1), ([0.5, 0.5], 0), ([0.5, 0.5], 3)])
def test_multinomial_bad_arguments(probs, num_samples):
    with pytest.raises(ValueError, match="probs|num_samples"):
        multinomial(torch.tensor(probs), num_samples)


@pytest.mark.parametrize("top_k", [1, 3, 50, 10**6])
def test_top_k_draws_only_from_the_k_most_likely(top_k):
    logits = torch.randn(1, 1, 50, generator=torch.Generator().manual_seed(0))
    allowed = set(logits[0, 0].topk(min(top_k, 50)).indices.tolist())
    torch.manual_seed(0)
    picks = sample(logits.expand(5000, 1, 50), temperature=3.0, top_k=top_k)
    assert set(picks.flatten().tolist()) == allowed


@pytest.mark.parametrize("probs, top_p, n", [
    ([0.5, 0.41, 0.09], 0.9, 2), ([0.5, 0.3, 0.1, 0.1], 0.8, 2), ([0.6, 0.4], 0.5, 1), ([0.6, 0.4], 1e-9, 1), ([0.6, 0.4], 1.0, 2),
    ([0.25, 0.25, 0.25, 0.25], 0.5, 2), ([0.25, 0.25, 0.25, 0.25], 0.51, 3)])
def test_top_p_edges(probs, top_p, n):
    assert kept(probs, top_p) == [True] * n + [False] * (len(probs) - n)
    assert sum(kept(probs[::-1], top_p)) == n


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    generator = torch.Generator().manual_seed(0)
    for i in range(200):
        logits = torch.randn(1, 80, generator=generator) * (0.01, 0.5, 2, 8)[i % 4]
        if i % 5 == 0:
            logits = logits.round()  # 许多字并列
        top_p = (0.9, 0.5, 0.99, 1.0, 1e-6, torch.rand(1, generator=generator).item() or 0.5)[i % 6]
        keep = ~outside_top_p(logits, top_p)[0]
        probs = torch.softmax(logits[0].double(), 0)
        total, smallest = probs[keep].sum().item(), probs[keep].min().item()
        assert total >= top_p - 1e-6  # 够了
        assert keep.all() if top_p == 1 else keep.sum() == 1 or total - smallest < top_p  # 少一个就不够
        if not keep.all():
            assert probs[~keep].max() <= smallest  # 留下的是概率最高的


def test_temperature_then_top_k_then_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None, None].expand(4000, 1, 4)
    torch.manual_seed(0)
    # top-k=2 之后是 4/7 和 3/7，top-p=0.5 只留第一个；先 top-p 就会留两个
    assert set(sample(logits, 1.0, top_k=2, top_p=0.5).flatten().tolist()) == {0}
    # 温度 0.5 之后是 16/30、9/30……，top-p=0.5 只留第一个；温度放在后面就会留两个
    assert set(sample(logits, 0.5, top_p=0.5).flatten().tolist()) == {0}
    assert set(sample(logits, 1.0, top_p=0.5).flatten().tolist()) == {0, 1}
