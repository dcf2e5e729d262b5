"""坏的、缺的、别人的 ckpt.pt：一句话，退出码 1，文件原样还在。"""
import pickle

import pytest
import torch

import diff
from conftest import ROOT
from gpt import load_checkpoint

GOOD = ROOT / "ckpt.pt"


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def change(**entries):
    return {**torch.load(GOOD, weights_only=True), **entries}


def test_loads_with_weights_only_and_is_small():
    ckpt = torch.load(GOOD, weights_only=True)
    assert set(ckpt) == {"model", "config", "chars", "training"} and GOOD.stat().st_size < 12 * 10**6
    assert all(isinstance(value, (int, float)) for value in ckpt["config"].values())
    model, tokenizer, facts = load_checkpoint(GOOD)
    assert len(tokenizer) == model.config.vocab_size == 6289 and not model.training and facts["val_loss"] > 0


@pytest.mark.parametrize("kind", ["empty", "cut off", "random", "text", "evil pickle", "evil zip", "other weights", "other vocabulary",
                                  "other config", "only weights", "a list", "folder"])
def test_a_checkpoint_that_will_not_do(tmp_path, kind):
    path, trap = tmp_path / "ckpt.pt", tmp_path / "trap"
    if kind == "folder":
        path.mkdir()
    elif kind in ("empty", "cut off", "random", "text"):
        path.write_bytes({"empty": b"", "cut off": GOOD.read_bytes()[:1_000_000], "random": bytes(range(256)) * 100,
                          "text": b"<html>404</html>"}[kind])
    elif kind == "evil pickle":
        path.write_bytes(pickle.dumps(Evil(trap)))
    else:
        torch.save({
            "evil zip": Evil(trap), "other weights": change(model={"w": torch.zeros(3)}), "other vocabulary": change(chars=list("春风")),
            "other config": change(config={"layers": 4}), "only weights": torch.load(GOOD, weights_only=True)["model"],
            "a list": [1, 2]}[kind], path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises((ValueError, OSError)) as error:
        load_checkpoint(path)
    assert "ckpt.pt" in str(error.value) and "\n" not in str(error.value)
    assert not trap.exists() and (before is None or path.read_bytes() == before)


def test_the_trap_works():
    """上面的坏文件真的能运行代码：不加 weights_only=True，陷阱就会触发。"""
    import tempfile
    from pathlib import Path
    with tempfile.TemporaryDirectory() as folder:
        trap = Path(folder) / "trap"
        pickle.loads(pickle.dumps(Evil(trap))).close()
        assert trap.exists()


@pytest.mark.parametrize("kind", ["missing", "cut off", "evil pickle"])
def test_generate_says_it_in_one_sentence(edited, kind):
    script = edited("generate.py")
    ckpt = script.parent / "ckpt.pt"
    trap = ckpt.with_name("trap")
    if kind == "missing":
        ckpt.unlink()
    else:
        ckpt.write_bytes(GOOD.read_bytes()[:5000] if kind == "cut off" else pickle.dumps(Evil(trap)))
    code, out, error = diff.run(script)
    assert (code, out, len(error.splitlines())) == (1, "", 1)
    assert "ckpt.pt" in error and "git checkout ckpt.pt" in error and "train.py" in error and not trap.exists()


def test_train_says_it_in_one_sentence(edited):
    script = edited("train.py")
    (script.parent / "data" / "poems.txt").unlink()
    code, out, error = diff.run(script)
    assert (code, out, len(error.splitlines())) == (1, "", 1) and "poems.txt" in error
    assert (script.parent / "ckpt.pt").read_bytes() == GOOD.read_bytes()
