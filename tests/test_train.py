"""训练：数据、验证集、存档、中断、接着训练。用很小的模型，几秒钟一次。"""
import functools
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import gpt
import train
from conftest import ROOT
from tokenizer import Tokenizer

POEMS = (ROOT / "data" / "poems.txt").read_text(encoding="utf-8").split()
TINY = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16, "dropout": 0.1}
QUICK = {"MAX_STEPS": 12, "EVAL_EVERY": 4, "BATCH_SIZE": 4, "WARMUP_STEPS": 3, "EMA_DECAY": 0.5, "LEARNING_RATE": 1e-2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """临时文件夹里的一次小训练：200 首诗，12 步，每 4 步评估；已有一个旧的 ckpt.pt。"""
    monkeypatch.setattr(train, "HERE", tmp_path)
    for name in ("POEMS", "CKPT", "SNAPSHOT"):
        monkeypatch.setattr(train, name, tmp_path / getattr(train, name).name)
    for name, value in QUICK.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "GPTConfig", functools.partial(gpt.GPTConfig, **TINY))
    monkeypatch.setattr(train, "DEVICE", "cpu")
    train.POEMS.write_text("\n".join(POEMS[:200]) + "\n", encoding="utf-8", newline="\n")
    train.CKPT.write_bytes(b"old")
    return tmp_path


def best_loss():
    return gpt.load_checkpoint(train.CKPT)[2]["val_loss"]


def weights():
    return torch.load(train.CKPT, weights_only=True)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupt_at(nth, function):
    """第 nth 次调用 function 时，像按了 Ctrl-C 一样。"""
    calls = iter(range(1, 1000))

    def interrupted(*args):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return function(*args)
    return interrupted


def test_split():
    training, validation = train.split(POEMS)
    assert len(validation) == round(0.05 * len(POEMS)) and sorted(training + validation) == sorted(POEMS)
    for line in ("黄河入海流", "疑是地上霜", "大漠孤烟直"):
        assert any(line in poem for poem in validation) and not any(line in poem for poem in training)
    state = random.getstate()
    assert train.split(POEMS) == (training, validation) and random.getstate() == state


def test_batches(monkeypatch):
    monkeypatch.setattr(train, "BATCH_SIZE", 3)
    monkeypatch.setattr(train, "WINDOW_PARTS", (1, 2, 64))
    torch.manual_seed(0)
    shapes, starts = set(), {}
    for _ in range(900):
        x, y = train.get_batch(torch.arange(100), torch.tensor([0, 10, 60]), 32)
        shapes.add(tuple(x.shape))
        starts.setdefault(x.size(1), set()).update(x[:, 0].tolist())
        assert torch.equal(y, x + 1) and (x[:, 1:] == x[:, :-1] + 1).all()
    assert shapes == {(3, 32), (6, 16), (96, 1)}  # 一段最短 1 个字
    assert starts == {32: {0, 10, 60}, 16: set(range(84)), 1: set(range(99))}  # 整段的从一首诗的开头读起，短的哪里都行


@pytest.mark.parametrize("block_size", [64, 32, 10])  # 比 block_size 长的诗分段读
def test_validation_loss_counts_every_character_once(block_size):
    tokenizer, poems = Tokenizer.from_text("\n".join(POEMS[:50])), POEMS[:50]
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(**{**TINY, "vocab_size": len(tokenizer), "block_size": block_size})).eval()
    total = count = 0
    for poem in poems:
        ids = torch.tensor(tokenizer.encode(f"\n{poem}\n"))
        for i in range(0, len(ids) - 1, block_size):
            with torch.no_grad():
                logits = model(ids[None, i:i + block_size][:, :len(ids) - 1 - i])[0][0]
            targets = ids[i + 1:i + block_size + 1]
            total -= torch.log_softmax(logits, -1)[range(len(targets)), targets].sum().item()
            count += len(targets)
    assert count == sum(len(poem) + 1 for poem in poems)
    assert train.evaluate(model, poems, tokenizer) == pytest.approx(total / count, abs=1e-5)


def test_learning_rate():
    rates = [train.learning_rate(step) for step in range(1, train.MAX_STEPS + 1)]
    peak = train.WARMUP_STEPS - 1
    assert rates[0] == pytest.approx(train.LEARNING_RATE / train.WARMUP_STEPS)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == train.LEARNING_RATE and rates[-1] == pytest.approx(train.MIN_LEARNING_RATE)


def test_a_training_from_end_to_end(folder, capsys):
    train.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("语料：200 首诗") and lines[1].startswith("模型：")
    assert [line.split()[1] for line in lines if line.startswith("第 ")] == [f"{step}/12" for step in (0, 4, 8, 12)]
    assert "验证损失" in lines[4] and "训练损失" in lines[4] and "字/秒" in lines[4] and "还要" in lines[4]
    assert sum("█" in line for line in lines) == 3 and str(train.CKPT) in lines[-1]
    assert sorted(path.name for path in folder.iterdir()) == ["ckpt.pt", "poems.txt"]
    model, tokenizer, facts = gpt.load_checkpoint(train.CKPT)
    assert tokenizer.chars == sorted(set(train.POEMS.read_text(encoding="utf-8"))) and not model.training
    validation = train.split(POEMS[:200])[1]
    assert train.evaluate(model, validation, tokenizer) == facts["val_loss"] and facts["max_steps"] == 12


@pytest.mark.parametrize("bf16", [False, True])
def test_bfloat16_is_for_training_steps_only(folder, monkeypatch, bf16):
    seen, forward = set(), gpt.GPT.forward

    def watched(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        seen.add((self.training, logits.dtype))
        return logits, loss
    monkeypatch.setattr(gpt.GPT, "forward", watched)
    monkeypatch.setattr(train, "BF16", bf16)
    train.main()
    assert seen == {(True, torch.bfloat16 if bf16 else torch.float32), (False, torch.float32)}
    first, loss = weights(), best_loss()
    assert all(w.dtype == torch.float32 for w in first.values())
    train.main()  # 同一个种子，再训练一次，一模一样
    assert same(weights(), first) and best_loss() == loss


def test_the_best_model_is_kept(folder, monkeypatch):
    fake, kept = iter([9.0, 3.0, 1.0, 2.0]), []

    def evaluate(model, *_):
        kept.append({name: p.clone() for name, p in model.state_dict().items()})
        return next(fake)
    monkeypatch.setattr(train, "evaluate", evaluate)
    train.main()
    assert best_loss() == 1.0 and same(weights(), kept[2]) and not same(weights(), kept[3])


def test_ctrl_c_anywhere_then_resume_ends_where_an_uninterrupted_training_ends(folder, monkeypatch, capsys):
    train.main()
    whole, loss = weights(), best_loss()
    for target, nth, saved in (("train_step", 6, 4), ("evaluate", 3, 4), ("poem", 4, 8), ("save", 3, 4), ("train_step", 2, 0),
                               ("save", 5, 12)):
        train.CKPT.write_bytes(b"old")
        train.SNAPSHOT.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(train, target, interrupt_at(nth, getattr(train, target)))
            with pytest.raises(SystemExit) as stop:
                train.main()
        assert "RESUME 改成 True" in stop.value.code if saved else "还没有存档" in stop.value.code
        assert not saved or f"第 {saved} 步的存档" in stop.value.code
        assert train.CKPT.read_bytes() == b"old" and not list(folder.glob("*.tmp"))
        monkeypatch.setattr(train, "RESUME", bool(saved))
        torch.manual_seed(99)  # 接着训练不该靠这里的随机数
        train.main()
        monkeypatch.setattr(train, "RESUME", False)
        assert same(weights(), whole) and best_loss() == loss, (target, nth)
        assert not train.SNAPSHOT.exists()


def test_ctrl_c_in_the_middle_of_writing(folder, monkeypatch):
    real = torch.save

    def half(content, f):
        real({}, f)
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        train.save({"a": 1}, train.CKPT)
    assert train.CKPT.read_bytes() == b"old" and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")])
def test_a_full_disk_loses_nothing(folder, monkeypatch, error):
    def full(content, f):
        f.write(b"half")
        raise error
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="写不了 .*ckpt.pt.*没有动"):
        train.save({}, train.CKPT)
    assert train.CKPT.read_bytes() == b"old" and not list(folder.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_noticed_before_training(folder, monkeypatch):
    monkeypatch.setattr(train, "HERE", folder / "nowhere")
    monkeypatch.setattr(train, "train_step", None)
    with pytest.raises(OSError, match="写不了"):
        train.main()


def test_resume_without_a_snapshot(folder, monkeypatch):
    monkeypatch.setattr(train, "RESUME", True)
    with pytest.raises(FileNotFoundError, match="RESUME 改成 False"):
        train.main()
    train.SNAPSHOT.write_bytes(b"PK\x03\x04 not a snapshot")
    with pytest.raises(ValueError, match="snapshot.pt 读不出来.*RESUME 改成 False"):
        train.main()
    assert train.CKPT.read_bytes() == b"old"


def test_a_snapshot_of_another_configuration_is_refused(folder, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", interrupt_at(6, train.train_step))
        with pytest.raises(SystemExit):
            train.main()
    snapshot = train.SNAPSHOT.read_bytes()
    monkeypatch.setattr(train, "RESUME", True)
    monkeypatch.setattr(train, "LEARNING_RATE", 5e-3)
    with pytest.raises(ValueError, match="另一种配置.*LEARNING_RATE 是 0.01（现在是 0.005）"):
        train.main()
    assert train.SNAPSHOT.read_bytes() == snapshot and train.CKPT.read_bytes() == b"old"
    monkeypatch.setattr(train, "RESUME", False)
    monkeypatch.setattr(train, "train_step", interrupt_at(1, train.train_step))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.main()
    assert "上一次训练留下了存档" in capsys.readouterr().out and train.SNAPSHOT.read_bytes() == snapshot


def test_a_training_that_blows_up_says_so(folder, monkeypatch):
    monkeypatch.setattr(train, "train_step", lambda *_: float("nan"))
    with pytest.raises(ValueError, match="LEARNING_RATE"):
        train.main()
    assert train.CKPT.read_bytes() == b"old"


@pytest.mark.parametrize("raw, word", [
    (None, "找不到"), (b"", "0 首"), ("春风。\r\n春雨。\r\n".encode(), "CRLF"), (b"\xef\xbb\xbf" + "春风。\n春雨。\n".encode(), "BOM"),
    ("春风。\n春雨。\n".encode("gbk"), "UTF-8"), ("春风。\n春雨。\n".encode(), "block_size")])
def test_a_bad_corpus(folder, raw, word):
    train.POEMS.unlink() if raw is None else train.POEMS.write_bytes(raw)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        train.main()
    assert word in str(error.value) and "poems.txt" in str(error.value) and train.CKPT.read_bytes() == b"old"
    assert raw is None or train.POEMS.read_bytes() == raw


@pytest.mark.parametrize("name, value", [
    ("MAX_STEPS", 0), ("MAX_STEPS", 1.5), ("EVAL_EVERY", 0), ("BATCH_SIZE", 0), ("LEARNING_RATE", -1), ("LEARNING_RATE", "1e-3"),
    ("LEARNING_RATE", float("nan")), ("MIN_LEARNING_RATE", -1), ("MIN_LEARNING_RATE", 0.1),
    ("WARMUP_STEPS", -1), ("WARMUP_STEPS", 12), ("WEIGHT_DECAY", -0.1), ("EMA_DECAY", 1.0), ("VAL_FRACTION", 0),
    ("VAL_FRACTION", 1), ("SEED", -1), ("SEED", "a"), ("SPLIT_SEED", None), ("WINDOW_PARTS", ()), ("WINDOW_PARTS", (0,)),
    ("WINDOW_PARTS", 1), ("RESUME", "yes")])
def test_a_bad_constant_is_named(folder, monkeypatch, name, value):
    monkeypatch.setattr(train, name, value)
    with pytest.raises(ValueError) as error:
        train.main()
    assert name in str(error.value) and repr(value) in str(error.value) and train.CKPT.read_bytes() == b"old"


def test_no_warm_up(folder, monkeypatch):
    monkeypatch.setattr(train, "WARMUP_STEPS", 0)
    train.main()
    assert best_loss() < 8


@pytest.mark.skipif(sys.platform == "win32", reason="Windows 没有这些信号")
@pytest.mark.parametrize("kill", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_signals_leave_the_old_checkpoint_whole(edited, kill):
    script = edited("train.py", MAX_STEPS=100000, EVAL_EVERY=20, BATCH_SIZE=2, WARMUP_STEPS=5)
    edited("gpt.py", n_layer=1, n_embd=16, block_size=16)
    poems = script.parent / "data" / "poems.txt"
    poems.write_text("\n".join(POEMS[:200]) + "\n", encoding="utf-8", newline="\n")
    before = (script.parent / "ckpt.pt").read_bytes()
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not process.stdout.readline().decode("utf-8").startswith("第 40/"):
        assert process.poll() is None
    time.sleep(random.random() / 10)
    process.send_signal(getattr(signal, kill))
    out, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None) and (script.parent / "ckpt.pt").read_bytes() == before
    if kill == "SIGINT":
        assert process.returncode == 1 and "训练停在第" in err.decode("utf-8") and "RESUME" in err.decode("utf-8")
        assert "Traceback" not in err.decode("utf-8") and "\r" not in out.decode("utf-8")
    resumed = edited("train.py", RESUME=True, MAX_STEPS=100000)
    process = subprocess.Popen([sys.executable, resumed], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [process.stdout.readline().decode("utf-8") for _ in range(3)]
    process.kill()
    process.communicate()
    assert lines[2].startswith("从第 ")
