"""改错了的常量：一句话说清楚，退出码 1，没有调用栈。"""
import pytest

import diff
import generate

BAD = [
    ("SEED", -1), ("SEED", 1.5), ("SEED", None), ("TEMPERATURES", (-1,)), ("TEMPERATURES", (1.0, "热")), ("TEMPERATURES", (float("nan"),)),
    ("TEMPERATURES", 0.3), ("FILTER_TEMPERATURE", -1), ("OPENING_TEMPERATURE", -0.5), ("TOP_K", 0), ("TOP_K", -5), ("TOP_K", 2.5),
    ("TOP_K", None), ("TOP_P", 0), ("TOP_P", 1.5), ("TOP_P", -0.1), ("TOP_P", "0.9"), ("N_POEMS", 0), ("N_POEMS", "三"),
    ("PROMPTS", "春风"), ("PROMPTS", ("",)), ("PROMPTS", ("白日,黄河",)), ("PROMPTS", ("A",)), ("PROMPTS", ("牀前",)),
    ("PROMPTS", ("春🙂",)), ("PROMPTS", (3,)), ("OPENINGS", ("大漠\n",)), ("OPENINGS", ("",)), ("OPENINGS", ("hello",)),
    ("HEADS", (("春，", 7),)), ("HEADS", (("春\n", 7),)), ("HEADS", (("", 7),)), ("HEADS", (("春A", 7),)), ("HEADS", (("春", 0),)),
    ("HEADS", ("春眠不觉", 7)), ("HEADS", (("春眠", 7, 7),)), ("QUATRAIN", "yes"), ("LENGTHS", (0,)), ("LENGTHS", (32, -1)),
    ("LENGTHS", (32.0,)), ("LENGTHS", 32), ("MAX_CHARS", 0), ("REPEATS", 0)]


@pytest.mark.parametrize("name, value", BAD)
def test_a_bad_constant_is_named(monkeypatch, capsys, name, value):
    monkeypatch.setattr(generate, name, value)
    with pytest.raises(ValueError) as error:
        generate.main()
    sentence = str(error.value)
    assert name in sentence and "\n" not in sentence and capsys.readouterr().out == ""
    wrong = value
    while isinstance(wrong, tuple) and len(wrong) == 1:
        wrong = wrong[0]
    assert any(repr(part) in sentence for part in ([wrong, *wrong] if isinstance(wrong, tuple) else [wrong])), sentence


@pytest.mark.parametrize("script, constants, words", [
    ("generate.py", {"PROMPTS": "('a,b🙂',)"}, ("PROMPTS", "a , b 🙂", "，")),
    ("generate.py", {"TEMPERATURES": "(-1,)"}, ("TEMPERATURES", "-1", "不小于 0")),
    ("gpt.py", {"n_embd": 130}, ("n_embd", "130", "n_head", "4")),
    ("gpt.py", {"block_size": 0}, ("block_size", "0", "不小于 1"))])
def test_one_sentence_and_exit_status_1(edited, script, constants, words):
    path = edited(script, **constants)
    before = (path.parent / "ckpt.pt").read_bytes()
    code, out, error = diff.run(path.parent / "generate.py")
    assert code == 1 and out.count("==") == 0 and len(error.splitlines()) == 1 and "Traceback" not in error
    assert all(word in error for word in words) and (path.parent / "ckpt.pt").read_bytes() == before


def test_train_says_it_too(edited):
    code, out, error = diff.run(edited("train.py", LEARNING_RATE=-1))
    assert (code, out, len(error.splitlines())) == (1, "", 1) and "LEARNING_RATE" in error and "-1" in error


def test_a_slip_in_the_code_still_shows_where(edited):
    path = edited("generate.py", N_POEMS="N_POEM")
    code, _, error = diff.run(path)
    assert code == 1 and "NameError" in error and "line" in error
