"""读者改了什么：常量、练习、代码里的笔误、坏的 ckpt.pt。"""
import ast
import hashlib
import os
import pickle
import re
import signal
import sys
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch

import generate
import gpt
from conftest import ROOT, SHIPPED, SHIPPED_CKPT, set_constant, shipped

pytestmark = shipped
CKPT = (ROOT / "ckpt.pt").read_bytes()
TRANSCRIPT = (ROOT / "tests" / "transcript.txt").read_text(encoding="utf-8")

BAD = [
    ("SEED", -1), ("SEED", 1.5), ("SEED", None), ("SEED", 2**63), ("SEED", True), ("TEMPERATURES", (-1,)),
    ("TEMPERATURES", (1.0, "热")), ("TEMPERATURES", (float("nan"),)), ("TEMPERATURES", (True,)), ("TEMPERATURES", 0.3),
    ("FILTER_TEMPERATURE", -1), ("FILTER_TEMPERATURE", float("inf")), ("TOP_K", 0), ("TOP_K", -5), ("TOP_K", 2.5), ("TOP_K", None),
    ("TOP_K", True), ("TOP_P", 0), ("TOP_P", 1.5), ("TOP_P", -0.1), ("TOP_P", "0.9"), ("TOP_P", True), ("N_POEMS", 0),
    ("N_POEMS", "三"), ("PROMPTS", "春风"), ("PROMPTS", ("",)), ("PROMPTS", ("白日,黄河",)), ("PROMPTS", ("A",)),
    ("PROMPTS", ("牀前",)), ("PROMPTS", ("春🙂",)), ("PROMPTS", (3,)), ("OPENINGS", ("大漠\n",)), ("OPENINGS", ("",)),
    ("OPENINGS", ("hello",)), ("OPENINGS", ("春" * 81,)), ("HEADS", (("春，", 7),)), ("HEADS", (("春\n", 7),)), ("HEADS", (("", 7),)),
    ("HEADS", (("春A", 7),)), ("HEADS", (("春", 0),)), ("HEADS", (("春", True),)), ("HEADS", (("春" * 20, 7),)),
    ("HEADS", ("春眠不觉", 7)), ("HEADS", (("春眠", 7, 7),)), ("QUATRAIN", "yes"), ("QUATRAIN", 1), ("LENGTHS", (0,)),
    ("LENGTHS", (32, -1)), ("LENGTHS", (32.0,)), ("LENGTHS", 32), ("TEMPERATURES", (10**400,)), ("TEMPERATURES", (Fraction(1, 2),)),
    ("FILTER_TEMPERATURE", Fraction(1, 2)), ("PROMPTS", ("⽩日",))]


@pytest.mark.parametrize("name, value", BAD)
def test_a_bad_constant_is_named(monkeypatch, capsys, name, value):
    monkeypatch.setattr(generate, name, value)
    with pytest.raises(SystemExit) as stop:
        generate.main()
    sentence = stop.value.code
    assert name in sentence and "\n" not in sentence and capsys.readouterr().out == ""
    parts = [value]
    for part in parts:  # 哪一层的值错了，就该说出哪一层
        parts += part if isinstance(part, tuple) else []
    assert any(repr(part) in sentence for part in parts), sentence


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="这些是 README 建议读者改的，只在 CI 上检查")
@pytest.mark.parametrize("name", SHIPPED)
def test_the_constants_that_readers_edit_are_shipped_as_the_lesson_has_them(name):
    source = (ROOT / name).read_text(encoding="utf-8")
    for constant, value in SHIPPED[name].items():
        if constant != "DEVICE":  # 这一个是看机器的
            assert ast.dump(ast.parse(set_constant(source, constant, value))) == ast.dump(ast.parse(source)), constant


def test_both_ends_and_code_points_are_said(lesson):
    lesson.edit("generate.py", SEED=2**63)
    lesson.fails("generate.py", f"SEED 应为 0 到 {2**63 - 1} 的整数，得到 {2**63}")
    lesson.edit("generate.py", SEED=1, PROMPTS=r"('白 日\u200b\ud800',)")
    lesson.fails("generate.py", "PROMPTS", "U+0020", "U+200B", "U+D800")
    lesson.edit("generate.py", PROMPTS="('a,b🙂',)")
    lesson.fails("generate.py", "PROMPTS", "a、,（请换成 ，）、b、🙂")
    lesson.edit("generate.py", PROMPTS="('春风',)")
    for name, value, allowed in (("n_embd", 130, "n_head（4）的整数倍"), ("block_size", 0, "不小于 1"), ("dropout", 1, "0 到 0.9")):
        before = (lesson.folder / "gpt.py").read_text(encoding="utf-8")
        lesson.edit("gpt.py", **{name: value})
        lesson.fails("generate.py", name, str(value), allowed)
        lesson.fails("train.py", name, str(value), allowed)
        lesson.write("gpt.py", before)
    lesson.edit("train.py", LEARNING_RATE=-1)
    lesson.fails("train.py", "LEARNING_RATE", "-1", "0 到 1 的数，不含 0")
    code, out, error = lesson.run("train.py", PYTHONIOENCODING="gbk")  # 真的运行一次：退出码和编码也对
    assert (code, out, len(error.splitlines())) == (1, "", 1) and "LEARNING_RATE 应为" in error
    assert (lesson.folder / "ckpt.pt").read_bytes() == CKPT


# 读者的笔误：(文件, 原来的, 改成的, 调用栈的最后一行, 出错的那一行)
SLIPS = [
    ("gpt.py", "self.lm_head(self.ln_f(x))", "self.lm_head(self.lnf(x))", "AttributeError", "gpt.py"),
    ("gpt.py", "        self.config = config\n", "        self.config = config\n        [].remove(1)\n", "ValueError", "[].remove(1)"),
    ("gpt.py", "block_size: int = 128", "block_size = 128", "TypeError", "GPTConfig(**config)"),
    ("gpt.py", "    next_id = multinomial(", "    a, b = ()\n    next_id = multinomial(", "ValueError", "in sample"),
    ("generate.py", "    show(1, write_poem, opening)", "    ids, _ = encode(\"\\n\")\n        show(1, write_poem, opening)", "ValueError", "in openings"),
    ("generate.py", "top = torch.topk(", "top = torch.topkk(", "AttributeError", "in probabilities"),
    ("tokenizer.py", "for i, ch in enumerate(self.chars)}", "for ch in enumerate(self.chars)}", "NameError", "tokenizer.py"),
    ("tokenizer.py", "        names = ", "        a, b, c = unknown\n        names = ", "ValueError", "in explain_unknown")]


@pytest.mark.parametrize("name, old, new, kind, where", SLIPS)
def test_a_slip_in_the_code_shows_its_own_error_and_line(lesson, name, old, new, kind, where):
    lesson.edit("generate.py", TOP_P=0.9, QUATRAIN=True, LENGTHS=(8,), N_POEMS=1, TEMPERATURES=(1.0,))
    if where == "in explain_unknown":
        lesson.edit("generate.py", PROMPTS="('A',)")
    lesson.replace(name, old, new)
    code, _, error = lesson.run_here("generate.py")
    assert code == 1 and error.startswith("Traceback") and re.search(r'\.py", line \d+', error)
    assert error.strip().splitlines()[-1].startswith(kind) and where in error and "检查点" not in error


def test_a_slip_while_training_shows_its_line_too(small):
    small.replace("train.py", "_, loss = model(x, y)", "_, loss, _ = model(x, y)")
    code, _, error = small.run_here("train.py")
    assert code == 1 and "ValueError: not enough values" in error and "_, loss, _ = model(x, y)" in error


def sections(out):
    """按横幅分开，list[list[str]]。"""
    return [section.splitlines() for section in re.split(r"\n\n(?===)", out)]


def run(lesson):
    code, out, error = lesson.run_here("generate.py")
    assert (code, error) == (0, "")
    return sections(out)


def test_exercises_1_and_2(lesson):
    before = sections(TRANSCRIPT)
    lesson.edit("generate.py", TOP_P=0.9, QUATRAIN=True, LENGTHS=(20,))
    out = run(lesson)
    assert out[2][:4] == before[2] and out[2][4] == "  温度 1.5，top-p=0.9：" and len(out[2]) == 8
    assert len(set(out[2][5:])) == 3 and all(line.startswith("    ") for line in out[2][5:])
    assert out[4][:3] == before[4] and out[4][3] == "  七言绝句（固定格式）：" and len(out[4]) == 7
    assert all(re.fullmatch("    (?:[\u4e00-\u9fff]{7}[，。]){3}[\u4e00-\u9fff]{7}。?", line) for line in out[4][4:])
    assert [out[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)]


def test_exercise_3(lesson):
    """block_size 512，随机初始化；再缩成一层训练 4 步，就用训练出来的。"""
    lesson.edit("gpt.py", block_size=512)
    lesson.edit("generate.py", LENGTHS=(201,))
    out = run(lesson)
    assert out[:5] == sections(TRANSCRIPT)[:5]
    assert "随机初始化" in out[5][1] and "block_size 是 512，ckpt.pt 的是 128" in out[5][1] and "半分钟" in out[5][2]
    assert out[5][3] == "  同样的随机种子，写 201 个字：用缓存和不用缓存的结果完全一样"
    assert out[5][-1].endswith("= 4 KB，512 个词元共 2048 KB") and len(out[5]) == 6
    lesson.edit("gpt.py", n_layer=1, n_embd=16)
    lesson.edit("train.py", MAX_STEPS=2, EVAL_EVERY=2, BATCH_SIZE=1, WARMUP_STEPS=1, DECAY_STEPS=1, VAL_FRACTION=0.001)
    lesson.edit("generate.py", LENGTHS=(200,), N_POEMS=1)
    assert lesson.run_here("train.py")[0] == 0
    out = run(lesson)
    assert len(out[5]) == 4 and "写 200 个字：用缓存和不用缓存的结果完全一样" in out[5][1]
    assert out[5][3].endswith("2 × 1 层 × 16 维 × 4 字节 = 0.125 KB，512 个词元共 64 KB")


def test_other_values(lesson):
    lesson.edit("generate.py", TEMPERATURES=(0, 0.5), TOP_K=1, N_POEMS=2, SEED=12345, OPENINGS=("春", "明月几时有，把酒"),
                HEADS=(("山", 5), ("一二三四五六七八九十百千", 7)), PROMPTS=("\n", "一" * 80), LENGTHS=(140, 20))
    out = run(lesson)
    assert out[1][0] == "== 2. 同样的随机种子，两个温度各写 2 首" and out[1][1] == "  温度 0：" and out[1][2] == out[1][3]
    assert out[1][4] == "  温度 0.5：" and out[1][5] != out[1][6]
    assert out[2][0].endswith("最高的 1 个字里选（top-k=1）") and out[2][1] == out[2][2] == out[1][2]
    assert out[3][1].startswith("    春") and out[3][2].startswith("    明月几时有，把酒")
    assert out[4][2][4::8][:12] == "一二三四五六七八九十百千"
    assert len(out[0]) == 3 and "「⏎」→" in out[0][1]
    assert "写 140 个字：用缓存和不用缓存的结果完全一样" in out[5][1]
    assert "超过 block_size（128）" in out[5][4] and "省不了" in out[5][4] and len(out[5]) == 6
    lesson.edit("generate.py", N_POEMS=2, TOP_K=100000, TEMPERATURES=(1.5,) * 11, LENGTHS=(), PROMPTS=(), OPENINGS=(), HEADS=())
    out = run(lesson)
    assert out[2][1:] == out[1][2:4] and "11个温度" in out[1][0]  # 全部的字都可选，就和不限制一样
    assert [len(section) for section in out] == [1, 1 + 11 * 3, 3, 1, 1, 1]


class Evil:
    def __reduce__(self):
        return open, ("trap", "w")


def change(**entries):
    return {**torch.load(ROOT / "ckpt.pt", weights_only=True), **entries}


def test_ckpt_is_small_and_plain():
    ckpt = change()
    assert hashlib.sha256(CKPT).hexdigest() == SHIPPED_CKPT
    assert ckpt["config"] == asdict(gpt.GPTConfig())
    assert set(ckpt) == {"model", "config", "chars", "training"} and len(CKPT) < 12 * 10**6
    assert all(isinstance(value, (int, float)) for value in ckpt["config"].values())
    assert len(ckpt["chars"]) == generate.model.config.vocab_size == 6289 and not generate.model.training


def test_a_checkpoint_that_will_not_do(lesson, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = {"empty": b"", "cut off": CKPT[:1_000_000], "random": bytes(range(256)) * 100, "text": b"<html>404</html>",
           "evil pickle": pickle.dumps(Evil(), protocol=2), "evil zip": Evil(), "other vocabulary": change(chars=list("春风")),
           "other config": change(config={"layers": 4}), "a key too many": change(config={**change()["config"], "layers": 4}),
           "a key too few": change(config={k: v for k, v in change()["config"].items() if k != "n_head"}),
           "another kind": change(config={**change()["config"], "n_layer": "4"}),
           "another head": change(config={**change()["config"], "n_head": 3}),
           "a prefix": change(model={"_orig_mod." + k: v for k, v in change()["model"].items()}), "only weights": change()["model"], "a list": [1, 2],
           "other weights": change(model={"w": torch.zeros(3)})}
    for kind, content in bad.items():
        path = lesson.write("ckpt.pt", content if isinstance(content, bytes) else b"")
        if not isinstance(content, bytes):
            torch.save(content, path)
        before = path.read_bytes()
        lesson.fails("generate.py", "ckpt.pt 不是这一课的检查点", "python train.py 重新训练", "压缩包")
        assert path.read_bytes() == before and not (tmp_path / "trap").exists()
    path.unlink()
    lesson.fails("generate.py", "找不到", "ckpt.pt", "git checkout ckpt.pt", "压缩包")
    path.mkdir()
    lesson.fails("generate.py", "ckpt.pt", "git checkout ckpt.pt", "压缩包")
    pickle.loads(pickle.dumps(Evil())).close()  # 不加 weights_only=True，陷阱真的会触发
    assert (tmp_path / "trap").exists()


def test_the_sentence_says_what_is_really_wrong(lesson):
    """没有空的范围，没有空的引号；不怪没有错的文件。"""
    lesson.edit("generate.py", HEADS="(('春' * 20, 7),)")
    lesson.fails("generate.py", "HEADS", "连标点的总字数", "不超过 block_size（128）的数，得到 160")
    lesson.edit("generate.py", HEADS="(('春', 7),)", OPENINGS="('',)")
    assert "不能有" not in lesson.fails("generate.py", "OPENINGS", "1 到 80 个字的文字，得到 ''")
    lesson.edit("generate.py", OPENINGS="('春',)", PROMPTS="('⽩',)")
    lesson.fails("generate.py", "⽩ U+2F69（请换成 白）")
    lesson.edit("generate.py", PROMPTS="('春',)", QUATRAIN=True, N_POEMS=1, LENGTHS=(4,))
    lesson.edit("gpt.py", dropout=0.1)  # 不影响写诗，还是量 ckpt.pt 的模型
    assert "随机初始化" not in lesson.run_here("generate.py")[1]
    lesson.edit("gpt.py", n_layer=2)
    code, out, error = lesson.run_here("generate.py")
    assert (code, error) == (0, "") and "n_layer 是 2，ckpt.pt 的是 4" in out and "block_size 是" not in out


def test_a_checkpoint_whose_window_is_too_short_for_a_quatrain(small):
    assert small.run_here("train.py")[0] == 0
    small.edit("generate.py", QUATRAIN=True, PROMPTS=("春",), OPENINGS=("春",), HEADS=(("春", 5),))
    small.fails("generate.py", "QUATRAIN", "block_size 应为不小于 33 的整数，得到 32")


def test_a_slip_in_the_checks_keeps_its_traceback_in_both_scripts(lesson):
    lesson.replace("gpt.py", "        check_config(self)", "        a, b = (1, 2, 3)\n        check_config(self)")
    for name in ("generate.py", "train.py"):
        code, _, error = lesson.run_here(name)
        assert code == 1 and "Traceback" in error and "in __post_init__" in error and "too many values" in error


def test_weights_that_no_longer_fit_the_model_are_said_to_be_that(lesson):
    source = (lesson.folder / "gpt.py").read_text(encoding="utf-8")
    lesson.write("gpt.py", source.replace("self.fc", "self.up"))
    lesson.fails("generate.py", "权重和 gpt.py 里的模型对不上", "blocks.0.up.weight", "共 16 处")
    lesson.write("gpt.py", source.replace("4 * config.n_embd", "2 * config.n_embd"))
    lesson.fails("generate.py", "权重和 gpt.py 里的模型对不上", "blocks.0.fc.weight")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows 没有这个信号")
def test_ctrl_c_shows_no_stack(lesson):
    lesson.edit("generate.py", N_POEMS=1000)
    process = lesson.start("generate.py")
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].decode("utf-8") == "\n已停止。\n" and process.returncode == 1
