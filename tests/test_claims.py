"""课文对模型的说法，对课程自带的 ckpt.pt 都成立；说法本身写在 claims.py 里。"""
import pytest
import torch

import claims
import generate
import train
from conftest import ROOT, shipped

pytestmark = shipped

FACTS = torch.load(ROOT / "ckpt.pt", weights_only=True)["training"]


@pytest.mark.parametrize("claim", [claims.claim_1, claims.claim_2, claims.claim_8])
def test_claims_about_the_model(claim):
    table = claim()
    assert all(table.values()), table


def test_claims_about_the_poems_on_screen():
    table = claims.claims_3_to_5(generate.SEED)
    assert len(table) == 12 and all(table.values()), table


def test_no_smaller_seed_among_the_last_few_hundred():
    """从头找起要几分钟：python tests/claims.py。这里看紧挨着的 200 个。"""
    first = max(0, generate.SEED - 199)
    assert claims.find_seed(first, generate.SEED) == generate.SEED


def test_rows_written_together_are_the_poems_written_alone():
    rows = claims.Rows(range(8))
    together = list(zip(*(rows.poems("", 1.0) for _ in range(2))))
    for seed, poems in enumerate(together):
        torch.manual_seed(seed)
        assert [generate.write_poem("", 1.0).rstrip("…") for _ in range(2)] == list(poems)


def test_what_rare_and_regular_mean():
    assert claims.rare("春风不度玉门关，") == [] and claims.rare("麕酲飏襞雪噭，") == ["麕", "酲", "飏", "襞", "噭"]
    assert claims.regular("白日依山尽，黄河入海流。欲穷千里目，更上一层楼。")
    assert not any(map(claims.regular, ("白日依山尽，黄河入海流。", "白日依山尽，黄河入海流。欲穷千里目，更上一层楼", "")))


def test_losses_are_what_the_checkpoint_says_and_close_together():
    _, val_poems = train.split(claims.TEXT.split())
    for skip, name in ((0, "val_loss"), (1, "openings_loss")):
        assert train.evaluate(generate.model, val_poems, generate.tokenizer, skip) == pytest.approx(FACTS[name], abs=1e-3)
    assert FACTS["val_loss"] <= 4.60 and FACTS["openings_loss"] - FACTS["val_loss"] <= 0.25
    assert FACTS["seed"] == train.SEED and FACTS["max_steps"] == train.MAX_STEPS
    assert (train.LEARNING_RATE, train.WARMUP_STEPS, train.DECAY_STEPS, train.WEIGHT_DECAY) == (2e-3, 200, 600, 0.1)
