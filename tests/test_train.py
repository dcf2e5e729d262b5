"""训练：数据、验证集、存档、中断、接着训练。用很小的模型，几秒钟一次。"""
import os
import random
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction

import pytest
import torch

import gpt
import train
from conftest import ROOT, TINY, kill_later
from tokenizer import Tokenizer

POEMS = (ROOT / "data" / "poems.txt").read_text(encoding="utf-8").split()
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="要用 POSIX 的信号和终端")


def finish(small):
    code, out, error = small.run_here("train.py")
    assert (code, error) == (0, ""), error
    return out


def trained(small):
    return torch.load(small.folder / "ckpt.pt", weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_split(monkeypatch):
    train_poems, val_poems = train.split(POEMS)
    assert len(val_poems) == round(0.05 * len(POEMS)) and sorted(train_poems + val_poems) == sorted(POEMS)
    for line in ("黄河入海流", "疑是地上霜", "大漠孤烟直"):
        assert any(line in poem for poem in val_poems) and not any(line in poem for poem in train_poems)
    monkeypatch.setattr(train, "VAL_FRACTION", 1e-6)
    small_val = train.split(POEMS)[1]
    assert small_val and all(any(line in poem for line in train.HELD_OUT) for poem in small_val)
    assert not any(line in poem for poem in POEMS if poem not in small_val for line in train.HELD_OUT)
    monkeypatch.setattr(train, "VAL_FRACTION", 1e-6)
    monkeypatch.setattr(train, "HELD_OUT", ())
    assert len(train.split(POEMS[:50])[1]) == 1  # 至少留一首
    monkeypatch.undo()
    state = random.getstate()
    assert train.split(POEMS) == (train_poems, val_poems) and random.getstate() == state


def test_batches_half_from_a_poem_s_start_half_from_anywhere(monkeypatch):
    assert train.BATCH_SIZE * 128 * 6289 * 4 < 32 * 2**20  # 一步的分数，不到 glibc 每次都归还的大小
    monkeypatch.setattr(train, "BATCH_SIZE", 4)
    torch.manual_seed(0)
    starts = {0: set(), 2: set()}
    for _ in range(900):
        x, y = train.get_batch(torch.arange(100), torch.tensor([0, 10, 60]), 32)
        assert x.shape == (4, 32) and torch.equal(y, x + 1) and (x[:, 1:] == x[:, :-1] + 1).all()
        for half in starts:
            starts[half].update(x[half:half + 2, 0].tolist())
    assert starts == {0: {0, 10, 60}, 2: set(range(68))}


@pytest.mark.parametrize("block_size", [64, 32, 10])  # 比 block_size 长的诗分段读
@pytest.mark.parametrize("skip", [0, 1])
def test_validation_loss_counts_every_character_once(block_size, skip):
    tokenizer, poems = Tokenizer.from_text("\n".join(POEMS[:50])), POEMS[:50]
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(**{**TINY, "vocab_size": len(tokenizer), "block_size": block_size})).eval()
    total = count = 0
    for poem in poems:
        ids = torch.tensor(tokenizer.encode(f"\n{poem}\n"[skip:]))
        for i in range(0, len(ids) - 1, block_size):
            with torch.no_grad():
                logits = model(ids[None, i:i + block_size][:, :len(ids) - 1 - i])[0][0]
            targets = ids[i + 1:i + block_size + 1]
            total -= torch.log_softmax(logits, -1)[range(len(targets)), targets].sum().item()
            count += len(targets)
    assert count == sum(len(poem) + 1 - skip for poem in poems)
    assert train.evaluate(model, poems, tokenizer, skip) == pytest.approx(total / count, abs=1e-5)


def test_learning_rate_rises_stays_and_falls_to_zero():
    rates = [train.learning_rate(step) for step in range(1, train.MAX_STEPS + 1)]
    up, down = train.WARMUP_STEPS, train.MAX_STEPS - train.DECAY_STEPS
    assert rates[0] == pytest.approx(train.LEARNING_RATE / train.WARMUP_STEPS)
    assert rates[:up] == sorted(rates[:up]) and set(rates[up - 1:down]) == {train.LEARNING_RATE}
    assert rates[down - 1:] == sorted(rates[down - 1:], reverse=True) and rates[-1] == 0


def test_a_training_from_end_to_end(small):
    lines = finish(small).splitlines()
    poems = small.read("data/poems.txt").split()
    train_poems, val_poems = train.split(poems)
    n_train, n_val = (sum(len(poem) + 1 for poem in part) for part in (train_poems, val_poems))
    n_chars = len(set("\n".join(poems)))
    n_params = sum(p.numel() for p in gpt.GPT(gpt.GPTConfig(**TINY, vocab_size=n_chars)).parameters())
    assert lines[0] == f"语料：200 首诗，{n_train:,} 个字训练，{n_val:,} 个字验证，词表 {n_chars:,} 个字"
    assert lines[1] == f"模型：{n_params:,} 个参数，1 层，2 个头，16 维，block_size 32；在 cpu 上训练"
    steps = [line for line in lines if line.startswith("第 ")]
    assert [line.split()[1] for line in steps] == [f"{step}/12" for step in (0, 4, 8, 12)] and len(lines) == 11
    assert all(re.fullmatch(r"第 \d+/12 步  训练损失 \d\.\d{4}  验证损失 \d\.\d{4}（不给开头的换行符 \d\.\d{4}）  [\d,]+ 字/秒  还要 0:\d\d",
                            line) for line in steps[1:])
    assert "训练用了 0:0" in lines[-1] and str(small.folder / "ckpt.pt") in lines[-1]
    assert sorted(path.name for path in small.folder.iterdir()) == [
        "ckpt.pt", "data", "generate.py", "gpt.py", "tokenizer.py", "train.py"]
    ckpt = trained(small)
    facts = ckpt["training"]
    assert 0 < facts["minutes"] < 1 and facts["torch"] == torch.__version__.split("+")[0]
    assert ckpt["chars"] == sorted(set("\n".join(poems))) and facts["max_steps"] == 12 and facts["seed"] == train.SEED
    assert f"{facts['val_loss']:.4f}（不给开头的换行符 {facts['openings_loss']:.4f}）" in steps[-1]
    model = gpt.GPT(gpt.GPTConfig(**ckpt["config"]))
    model.load_state_dict(ckpt["model"])  # 写进去的正是最后一步的模型
    for skip, loss in ((0, facts["val_loss"]), (1, facts["openings_loss"])):
        assert train.evaluate(model, val_poems, Tokenizer(ckpt["chars"]), skip) == pytest.approx(loss, abs=1e-6)
    assert all(w.dtype == torch.float32 for w in ckpt["model"].values())
    torch.manual_seed(train.SEED)  # 最后打印的诗，是这个模型写的
    poem = model.generate(torch.zeros(1, 1, dtype=torch.long), 80, temperature=0.8, stop=0)[0].tolist()
    assert lines[-2] == "    " + Tokenizer(ckpt["chars"]).decode(poem).strip().replace("\n", " ")


# 按 Ctrl-C 的时刻：(在哪一行后面, 什么时候, 存档是第几步的)
INTERRUPTS = [("        optimizer.step()\n", "step == 0", 0), ("        loss.backward()\n", "step == 5", 4),
              ("        model.train()\n", "step == 10", 8), ("            f.flush()\n", "content.get('step') == 8", 4),
              ("            f.flush()\n", "'chars' in content", 12)]


@pytest.mark.parametrize("after, when, saved", INTERRUPTS)
def test_ctrl_c_then_resume_ends_where_an_uninterrupted_training_ends(small, after, when, saved):
    source = (small.folder / "train.py").read_text(encoding="utf-8")
    finish(small)
    whole = trained(small)
    indent = after[:len(after) - len(after.lstrip())]
    small.replace("train.py", after, f"{after}{indent}if {when}:\n{indent}    raise KeyboardInterrupt\n")
    small.write("ckpt.pt", b"old")
    code, _, error = small.run_here("train.py")
    assert code == 1 and "训练停下了；原来的 ckpt.pt 没有动" in error and "Traceback" not in error, error
    assert ("还没有能用的存档" if saved == 0 else f"第 {saved} 步的存档") in error
    assert (small.folder / "ckpt.pt").read_bytes() == b"old" and not list(small.folder.glob("*.tmp"))
    small.write("train.py", source)
    small.edit("train.py", RESUME=bool(saved))
    torch.manual_seed(99)  # 接着训练不该靠这里的随机数
    out = finish(small)
    assert not saved or f"从第 {saved} 步的存档接着训练" in out and "上一次训练留下了" not in out
    assert same(trained(small)["model"], whole["model"])
    assert trained(small)["training"]["val_loss"] == whole["training"]["val_loss"]
    assert not (small.folder / "snapshot.pt").exists()


def snapshot(small, at=5):
    """训练到第 at 步停下，留下第 4 步的存档；返回原来的 train.py。"""
    source = (small.folder / "train.py").read_text(encoding="utf-8")
    small.write("train.py", source.replace("        step += 1\n", f"        step += 1\n        1 / (step - {at})\n"))
    assert "ZeroDivisionError" in small.run_here("train.py")[2]
    small.write("train.py", source)
    return source


def test_a_snapshot_of_another_recipe_split_or_corpus_is_refused_by_name(small):
    source, raw = snapshot(small), (small.folder / "snapshot.pt").read_bytes()
    poems = (small.folder / "data" / "poems.txt").read_text(encoding="utf-8").splitlines(True)
    config = (small.folder / "gpt.py").read_text(encoding="utf-8")
    for name, value, words in (("LEARNING_RATE", 5e-3, "LEARNING_RATE 是 0.002（现在是 0.005）"), ("SEED", 77, "SEED 是"),
                               ("HELD_OUT", "('春风',)", "HELD_OUT 是"), ("SPLIT_SEED", 2, "SPLIT_SEED 是 1（现在是 2）")):
        small.edit("train.py", RESUME=True, **{name: value})
        code, _, error = small.run_here("train.py")
        assert code == 1 and "另一种配置" in error and words in error and len(error.splitlines()) == 1
        small.write("train.py", source)
    small.edit("train.py", RESUME=True)
    small.edit("gpt.py", n_embd=32)
    assert "n_embd 是 16（现在是 32）" in small.run_here("train.py")[2]
    small.write("gpt.py", config)
    small.write("data/poems.txt", "".join(reversed(poems)))  # 一样长，只是换了次序
    code, _, error = small.run_here("train.py")
    assert code == 1 and "诗的 SHA-256 是" in error and "LEARNING_RATE" not in error
    assert (small.folder / "snapshot.pt").read_bytes() == raw and (small.folder / "ckpt.pt").read_bytes() == b"old"
    small.write("data/poems.txt", "".join(poems))
    whole = torch.load(small.folder / "snapshot.pt", weights_only=True)
    other = {name: torch.zeros(3) for name in whole["model"]}
    for content in ({**whole, "model": other}, *({k: v for k, v in whole.items() if k != part} for part in whole)):
        torch.save(content, small.folder / "snapshot.pt")
        code, _, error = small.run_here("train.py")
        assert code == 1 and "snapshot.pt" in error and "Traceback" not in error and len(error.splitlines()) == 1, error
    torch.save({**whole, "seconds": 6000.0}, small.folder / "snapshot.pt")
    small.edit("train.py", EVAL_EVERY=3)  # 隔多少步评估不影响结果，可以改
    out = finish(small)
    assert "从第 4 步的存档接着训练" in out and "训练用了 100:0" in out  # 存档以前的时间也算
    small.edit("train.py", RESUME=True)
    assert "没有存档" in small.run_here("train.py")[2]
    small.write("snapshot.pt", b"PK\x03\x04 not a snapshot")
    code, _, error = small.run_here("train.py")
    assert code == 1 and "snapshot.pt 读不出来" in error and "RESUME 改成 False" in error
    torch.save({"recipe": Fraction(1, 2)}, small.folder / "snapshot.pt")  # 别的类，可以借机运行代码
    assert "读不出来（UnpicklingError）" in small.run_here("train.py")[2]


def test_an_old_snapshot_is_announced_before_it_is_overwritten(small):
    snapshot(small)
    raw = (small.folder / "snapshot.pt").read_bytes()
    small.replace("train.py", "        model.train()\n", "        raise KeyboardInterrupt\n")
    code, out, error = small.run_here("train.py")
    assert code == 1 and "第 4 步的存档" in error and "上一次训练留下了存档" in out and (small.folder / "snapshot.pt").read_bytes() == raw


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="要用 /dev/full")
@pytest.mark.parametrize("name, way", [("snapshot.pt", "还没有能用的存档"), ("ckpt.pt", "snapshot.pt 是第 12 步的存档")])
def test_a_full_disk_loses_nothing_and_says_how_to_go_on(small, name, way):
    source = small.read("train.py")
    small.replace("train.py", "    try:\n        with open(temporary", "    if path.name == '" + name + "':\n        os.symlink('/dev/full', temporary)\n"
                  "    try:\n        with open(temporary")
    code, _, error = small.run_here("train.py")
    assert code == 1 and f"{name}（" in error and "没有动" in error and way in error and len(error.splitlines()) == 1, error
    assert (small.folder / "ckpt.pt").read_bytes() == b"old" and not list(small.folder.glob("*.tmp"))
    small.write("train.py", source)
    small.edit("train.py", RESUME=name == "ckpt.pt")
    finish(small)


def test_after_the_new_checkpoint_is_written_nothing_says_untouched(small):
    small.replace("train.py", "        remove(SNAPSHOT)\n", "        raise KeyboardInterrupt\n")
    code, _, error = small.run_here("train.py")
    assert code == 1 and "新的 ckpt.pt 已经写好" in error and "没有动" not in error
    assert trained(small)["training"]["max_steps"] == 12


def test_what_cannot_be_removed_changes_nothing(small):
    small.replace("train.py", "        path.unlink(missing_ok=True)\n", "        raise PermissionError(path)\n")
    assert "写进了" in finish(small)


def test_twelve_steps_are_those_of_a_plain_loop_of_our_own(small):
    """另写一遍训练：学习率、裁剪、每个参数一组 AdamW、autograd.grad，和 train.py 的结果一样。"""
    small.edit("train.py", HAS_BFLOAT16=False)
    small.edit("gpt.py", dropout=0.1)
    small.replace("train.py", "        loss.backward()", "        (20 * loss).backward()")  # 梯度大到要裁剪
    printed = [float(loss) for loss in re.findall("训练损失 ([0-9.]+)", finish(small))]
    poems = small.read("data/poems.txt").split()
    tokenizer = Tokenizer.from_text("\n".join(poems))
    data = torch.tensor(tokenizer.encode("\n" + "\n".join(train.split(poems)[0]) + "\n"))
    starts = [i for i in range(len(data) - 32) if data[i] == data[0]]
    torch.manual_seed(6)
    model = gpt.GPT(gpt.GPTConfig(**TINY, vocab_size=len(tokenizer), dropout=0.1))
    names, params = zip(*model.named_parameters())
    optimizers = [torch.optim.AdamW([p], weight_decay=0.1 if p.dim() == 2 else 0.0, betas=(0.9, 0.99)) for p in params]
    losses = []
    for step in range(1, 13):
        at = [starts[i] for i in torch.randint(len(starts), (2,)).tolist()] + torch.randint(len(data) - 32, (2,)).tolist()
        x, y = (torch.stack([data[i + shift:i + shift + 32] for i in at]) for shift in (0, 1))
        losses.append(model(x, y)[1])
        grads = torch.autograd.grad(20 * losses[-1], params)
        norm = torch.stack([g.norm() for g in grads]).norm().item()
        rate = 2e-3 * (step / 3 if step < 3 else 1 if step < 6 else (12 - step) / 6)
        for p, g, optimizer in zip(params, grads, optimizers):
            p.grad = g * min(1, 1 / (norm + 1e-6))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    averages = torch.stack(losses).view(3, 4).mean(1).tolist()  # 每 4 步打印一次，是这 4 步的平均
    assert printed == pytest.approx(averages, abs=6e-5)
    for name, p in zip(names, params):
        least = 1e-5 if name.endswith("qkv.bias") else 3e-7  # k 的偏置本来没有梯度，只有舍入，Adam 把它放大了
        assert torch.allclose(p, trained(small)["model"][name], rtol=0, atol=least), name
    whole = trained(small)["model"]
    small.edit("train.py", HAS_BFLOAT16=True)
    finish(small)
    assert not same(trained(small)["model"], whole)  # 用 16 位的小数，舍入就不同


def test_the_last_step_is_evaluated_even_between_two_evaluations(small):
    small.edit("train.py", EVAL_EVERY=5)
    code, out, error = small.run("train.py")
    assert (code, error) == (0, "") and re.findall("第 ([0-9]+)/12 步", out) == ["0", "5", "10", "12"]


def test_speed_and_time_left(monkeypatch):
    monkeypatch.setattr(train, "MAX_STEPS", 400)
    monkeypatch.setattr(train, "BATCH_SIZE", 4)
    assert train.describe_speed(100, 0.25, gpt.GPTConfig(block_size=32)) == "512 字/秒  还要 1:15"


def test_two_saves_at_once_each_write_a_file_of_their_own(tmp_path, monkeypatch):
    """写到一半，另一个 train.py 也来写：两个都写得完，后改名的算数。"""
    path, fsync, calls = tmp_path / "ckpt.pt", os.fsync, []

    def save_another_first(f):
        calls.append(f)
        monkeypatch.setattr(os, "fsync", fsync)
        train.save({"step": 1}, path)
        assert torch.load(path, weights_only=True) == {"step": 1}
        fsync(f)
    monkeypatch.setattr(os, "fsync", save_another_first)
    train.save({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 2} and list(tmp_path.iterdir()) == [path]
    assert len(calls) == 1  # 真的写到磁盘上了，才改名


@pytest.mark.parametrize("length, enough", [(31, True), (30, False)])  # 加上换行，正好 32 个字就够
def test_the_smallest_corpus(small, length, enough):
    half = "，".join("春夏秋冬" * 4)
    small.write("data/poems.txt", "".join(f"{ch}{half[:length - 2]}。\n" for ch in "东西"))
    code, _, error = small.run_here("train.py")
    assert code == (not enough) and enough == ("block_size（32）" not in error), error


def test_a_bad_corpus(small):
    back = ("poems.txt", "git checkout", "压缩包")
    good = "".join(poem + "\n" for poem in POEMS[:60])
    for raw, word in ((None, "读不出来"), (b"", "第 1 行是空的"), (good.replace("\n", "\r\n").encode(), "CRLF"),
                      (b"\xef\xbb\xbf" + good.encode(), "BOM"), (good.encode("gbk", "ignore"), "不是 UTF-8"),
                      (good.encode("utf-16"), "UTF-16"), (good.replace("\n", "\r\n").encode("utf-16"), "UTF-16"),
                      (good.replace("，", "， ", 3).encode(), "第 1 行是空的，有空格"), (good.replace("\n", "\n\n").encode(), "第 2 行"),
                      ((POEMS[0] + "\n" + POEMS[1] + "\u3000\n").encode(), "第 2 行")):
        path = small.write("data/poems.txt", raw or b"")
        if raw is None:
            path.unlink()
        small.fails("train.py", word, *back)
        assert (small.folder / "ckpt.pt").read_bytes() == b"old" and (raw is None or path.read_bytes() == raw)
    small.write("data/poems.txt", "春，风。\n春，雨。\n")
    small.fails("train.py", "block_size（32）", "poems.txt")
    small.write("data/poems.txt", POEMS[0] + "\n")
    small.fails("train.py", "都留作验证了")
    for mark in "，。":
        small.write("data/poems.txt", good.replace(mark, ""))
        small.fails("train.py", f"没有「{mark}」")


@pytest.mark.parametrize("name, value", [
    ("MAX_STEPS", 0), ("MAX_STEPS", 1.5), ("MAX_STEPS", True), ("EVAL_EVERY", 0), ("BATCH_SIZE", 0), ("LEARNING_RATE", -1),
    ("LEARNING_RATE", "1e-3"), ("LEARNING_RATE", float("nan")), ("LEARNING_RATE", 2), ("WARMUP_STEPS", 0), ("DECAY_STEPS", 0),
    ("WEIGHT_DECAY", -0.1), ("VAL_FRACTION", 0), ("VAL_FRACTION", 1.5), ("SEED", -1), ("SEED", 2**63), ("SEED", "a"),
    ("SPLIT_SEED", None), ("HELD_OUT", "黄河入海流"), ("HELD_OUT", None), ("HELD_OUT", 5), ("HELD_OUT", (3,)),
    ("HELD_OUT", ("",)), ("RESUME", 1), ("RESUME", "False"), ("RESUME", None), ("VAL_FRACTION", 1), ("LEARNING_RATE", Fraction(1, 2))])
def test_a_bad_constant_is_named(monkeypatch, name, value):
    monkeypatch.setattr(train, name, value)
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert name in stop.value.code and repr(value[0] if value in ((3,), ("",)) else value) in stop.value.code and "\n" not in stop.value.code


@POSIX
def test_signals(small):
    """被杀掉、按 Ctrl-C，都留下能用的存档。"""
    small.edit("train.py", MAX_STEPS=10**6, EVAL_EVERY=20, BATCH_SIZE=2)
    for resume, kill in ((False, signal.SIGKILL), (True, signal.SIGINT)):
        small.edit("train.py", RESUME=resume)
        snapshot_path = small.folder / "snapshot.pt"
        before = snapshot_path.stat().st_mtime_ns if resume else None
        process = small.start("train.py")
        deadline = time.monotonic() + 120
        while not snapshot_path.exists() or snapshot_path.stat().st_mtime_ns == before:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(kill)
        out, error = (stream.decode("utf-8") for stream in process.communicate(timeout=60))
        assert (small.folder / "ckpt.pt").read_bytes() == b"old" and "\r" not in out
        assert torch.load(snapshot_path, weights_only=True)["step"] >= 20
    assert process.returncode == 1 and re.search("训练停下了.*第 \\d+ 步的存档", error) and "Traceback" not in error


@POSIX
@pytest.mark.slow
def test_ten_pairs_started_at_once(small):
    """没有锁：两个都好好结束，什么也不留下。"""
    for _ in range(10):
        (small.folder / "ckpt.pt").write_bytes(b"old")
        pair = [small.start("train.py"), small.start("train.py")]
        errors = [process.communicate(timeout=120)[1] for process in pair]
        assert [process.returncode for process in pair] == [0, 0], errors
        assert trained(small)["training"]["max_steps"] == 12
        assert not (small.folder / "snapshot.pt").exists() and not list(small.folder.glob("*.tmp"))


@POSIX
def test_a_terminal_sees_one_line_that_updates_in_place(small):
    import pty
    for term, in_place in (("xterm", True), ("dumb", False)):
        small.write("ckpt.pt", b"old")
        master, slave = pty.openpty()
        process = kill_later(subprocess.Popen([sys.executable, small.folder / "train.py"], stdout=slave, stderr=slave,
                                              env={**os.environ, "TERM": term, "OMP_NUM_THREADS": "1"}))
        os.close(slave)
        out = b""
        while True:
            try:
                out += os.read(master, 4096)
            except OSError:  # 程序结束，终端关了
                break
        text = out.decode("utf-8").replace("\r\n", "\n")
        assert process.wait() == 0 and text.count("第 12/12 步") >= 1
        assert ("\r第 1/12 步" in text) == in_place and ("\r" in text) == in_place and "\n第 1/12 步" not in text
