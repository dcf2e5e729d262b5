"""test_exercises.py 判得准不准：对的和错的答案各摆几个样子，一个一个放进答案的位置，看它怎么说。

几种对的、几种错的都在这里，所以先自己写完练习，再看这个文件。
"""
import ast
import os
import shutil
import subprocess
import sys
import textwrap
import types

import pytest

from conftest import COPY, ROOT, kill_later, set_constant
from test_exercises import doubled, judge_quatrain, judge_top_p

CALL = "logits = keep_top_p(logits, top_p)"
SAMPLE = f'''def sample(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 1e-6:
        return logits[:, -1, :].argmax(dim=-1, keepdim=True)
    logits = logits[:, -1, :] / temperature
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1:
        {CALL}
    return multinomial(F.softmax(logits, dim=-1), num_samples=1)
'''
SORTED = "probs, order = F.softmax(logits, dim=-1).sort(dim=-1, descending=True)\n"

RIGHT_TOP_P = {
    "bound": SORTED + "n = (probs.cumsum(-1) < top_p).sum(-1, keepdim=True)\n"
             "return logits.masked_fill(F.softmax(logits, dim=-1) < probs.gather(-1, n), float('-inf'))",
    "scatter": SORTED + "drop = probs.cumsum(-1) - probs >= top_p\n"
               "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))",
    "shift": SORTED + "drop = probs.cumsum(-1) > top_p\ndrop[..., 1:] = drop[..., :-1].clone()\ndrop[..., 0] = False\n"
             "logits[:, order[drop]] = float('-inf')\nreturn logits",
    "loop": SORTED + "total, keep = 0.0, []\nfor p, i in zip(probs[0].tolist(), order[0].tolist()):\n    keep.append(i)\n"
            "    total += p\n    if total >= top_p:\n        break\nout = torch.full_like(logits, float('-inf'))\n"
            "out[0, keep] = logits[0, keep]\nreturn out",
    "double": "probs, order = F.softmax(logits.double(), dim=-1).sort(dim=-1, descending=True)\n"
              "keep = probs.cumsum(-1).roll(1, -1) < top_p\nkeep[:, 0] = True\n"
              "return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), float('-inf'))"}
WRONG_TOP_P = {
    "nothing": ("return logits", "什么也没有去掉"),
    "drops_the_crossing": (SORTED + "drop = probs.cumsum(-1) > top_p\ndrop[:, 0] = False\n"
                           "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))", "跨过 p"),
    "may_drop_all": (SORTED + "drop = probs.cumsum(-1) > top_p\n"
                     "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))", "跨过 p"),
    "one_too_many": (SORTED + "n = ((probs.cumsum(-1) < top_p).sum(-1, keepdim=True) + 1).clamp(max=logits.size(-1) - 1)\n"
                     "return logits.masked_fill(F.softmax(logits, dim=-1) < probs.gather(-1, n), float('-inf'))", "多留了一个"),
    "not_sorted": ("probs = F.softmax(logits, dim=-1)\nreturn logits.masked_fill(probs.cumsum(-1) - probs >= top_p, float('-inf'))",
                   "先排序再累加"),
    "not_put_back": (SORTED + "return logits.masked_fill(probs.cumsum(-1) - probs >= top_p, float('-inf'))", "放回原来的位置"),
    "no_softmax": ("ranked, order = logits.sort(dim=-1, descending=True)\ndrop = ranked.cumsum(-1) - ranked >= top_p\n"
                   "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))", "先 softmax"),
    "ascending": ("probs, order = F.softmax(logits, dim=-1).sort(dim=-1)\ndrop = probs.cumsum(-1) - probs >= top_p\n"
                  "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))", "缺的一步"),
    "single": ("return logits.masked_fill(F.softmax(logits, dim=-1) < 1 - top_p, float('-inf'))", "累计概率"),
    "zero": (SORTED + "drop = probs.cumsum(-1) - probs >= top_p\n"
             "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), 0.0)", "缺的一步"),
    "probs_for_logits": (SORTED + "drop = probs.cumsum(-1) - probs >= top_p\n"
                         "drop = torch.zeros_like(drop).scatter(-1, order, drop)\n"
                         "return F.softmax(logits, dim=-1).masked_fill(drop, float('-inf'))", "分数照原样"),
    "twenty": ("return logits.masked_fill(logits < logits.topk(min(20, max(1, (F.softmax(logits, -1).sort(-1, True).values"
               ".cumsum(-1) < top_p).sum().item() + 1))).values[:, -1:], float('-inf'))", "不能先定"),
    "fixed": (SORTED + "drop = probs.cumsum(-1) - probs >= 0.9\n"
              "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float('-inf'))", "不能写死"),
    "not_low_enough": (SORTED + "drop = probs.cumsum(-1) - probs >= top_p\n"
                       "return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -20.0)", "负无穷"),
    "keeps_rank_minus_1": ("ranked = F.softmax(logits, dim=-1).sort(dim=-1, descending=True).values\n"
                           "k = max(1, int((ranked.cumsum(-1) < top_p).sum()))\n"
                           "return logits.masked_fill(logits < torch.topk(logits, k).values[:, -1:], float('-inf'))", "跨过 p"),
    "not_cumulated": ("return logits.masked_fill(F.softmax(logits, dim=-1) > top_p, float('-inf'))", "累计概率"),
    "slip": ("probs, order, x = F.softmax(logits, dim=-1).sort(dim=-1)\nreturn logits", "ValueError")}

STEP = '''        logits = model(ids)[0][0, -1] / 0.8
{rule}
        next_id = torch.multinomial(F.softmax(logits, dim=-1), 1)
        ids = torch.cat([ids, next_id[None]], dim=1)
'''
HEAD = "@torch.no_grad()\ndef quatrain({parameter}):\n    ids = encode('\\n')\n    for position in range(1, {end}):\n"
TAIL = "    return decode(ids[0].tolist()).strip()\n"
BAN = "        if position % 8:\n            logits[BANNED] = float('-inf')\n"
FORCE = ("        if position % 8 == 0:\n            other = torch.ones(len(logits), dtype=torch.bool)\n"
         "            other[BANNED[1:]] = False\n            logits[other] = float('-inf')\n")


def steps(rule, end=33, parameter="", tail=TAIL):
    return HEAD.format(parameter=parameter, end=end) + STEP.format(rule=rule.rstrip("\n")) + tail


LINES = '''@torch.no_grad()
def quatrain(temperature=0.8):
    ids = encode("\\n")
    for i in range(4):
        for _ in range(7):
            logits = model(ids)[0][0, -1] / temperature
            logits[BANNED] = float("-inf")
            next_id = multinomial(F.softmax(logits, dim=-1), 1)
            ids = torch.cat([ids, next_id[None]], dim=1)
        ids = torch.cat([ids, encode("，。"[i % 2])], dim=1)
    return decode(ids[0].tolist()).strip()
'''
CACHED = '''@torch.no_grad()
def quatrain():
    ids, caches, new = encode("\\n"), [{} for _ in model.blocks], encode("\\n")
    for position in range(1, 33):
        logits = model(new, caches=caches, start=ids.size(1) - 1)[0][0, -1]
        bias = torch.full_like(logits, float("-inf") if position % 8 == 0 else 0.0)
        bias[BANNED] = float("-inf")
        if position % 8 == 0:
            bias[tokenizer.encode("，。" if position < 32 else "。")] = 0.0
        new = multinomial(F.softmax(logits + bias, dim=-1), 1)[None]
        ids = torch.cat([ids, new], dim=1)
    return decode(ids[0].tolist())
'''
RETRY = '''def quatrain():
    import re
    while True:
        poem = decode(model.generate(encode("\\n"), 32, temperature=0.8)[0].tolist()).strip()
        if re.fullmatch("(.{7}[，。]){4}", poem):
            return poem
'''
RIGHT_QUATRAIN = {"by_position": steps(BAN + FORCE), "with_parameter": steps(BAN + FORCE, parameter="t=1.0"), "without_the_end":
                  steps(BAN + FORCE, end=32), "like_acrostic": LINES, "with_a_cache": CACHED}
WRONG_QUATRAIN = {
    "only_bans": (steps(BAN), "只禁止还不够"),
    "only_forces": (steps(FORCE), "缺的一步"),
    "newline_not_banned": (steps(BAN.replace("BANNED", "BANNED[1:]") + FORCE), "换行符"),
    "comma_not_banned": (steps(BAN.replace("BANNED", "[BANNED[0], BANNED[2]]") + FORCE), "不许出现标点"),
    "five_characters": (LINES.replace("range(7)", "range(5)"), "第 6 个字符"),
    "two_lines": (LINES.replace("range(4)", "range(2)"), "一共 16 个字符"),
    "off_by_one": (steps((BAN + FORCE).replace("position %", "(position - 1) %")), "第 1 个字符"),
    "prints": (steps(BAN + FORCE, tail="    print(decode(ids[0].tolist()).strip())\n"), "return"),
    "forgets_the_text": (LINES.replace("model(ids)", "model(ids[:, -1:])"), "全送进模型"),
    "picks_afterwards": (RETRY, "不是写完再挑"),
    "slip": (LINES.replace('encode("\\n")', 'encode("\\n"), 1', 1), "Error")}


def put(source, name, answer):
    """把 source 里的函数 name 换成 answer；没有就加在最后。"""
    lines = source.split("\n")
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    for node in reversed(nodes):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines[first - 1:node.end_lineno] = answer.split("\n") if node is nodes[-1] else []
    return "\n".join(lines) if nodes else source.rstrip("\n") + "\n\n\n" + answer


def put_keep_top_p(source, body):
    return put(source, "keep_top_p", "def keep_top_p(logits, top_p):\n" + textwrap.indent(body, "    "))


def put_top_p(source, body, inline):
    """答案放进 keep_top_p，或者写在 sample 里调用它的地方。"""
    if not inline:
        return put(put_keep_top_p(source, body), "sample", SAMPLE)
    lines = body.split("\n")
    lines[-1] = lines[-1].replace("return", "logits =")
    return put(source, "sample", SAMPLE.replace(CALL, textwrap.indent("\n".join(lines), " " * 8).lstrip()))


def load(name, source):
    module = types.ModuleType("sample_" + name)
    module.__file__ = str(COPY / name)
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


GPT_SOURCE = (COPY / "gpt.py").read_text(encoding="utf-8")
GENERATE_SOURCE = (COPY / "generate.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("name", RIGHT_TOP_P)
def test_a_right_top_p_passes(name, inline):
    assert judge_top_p(load("gpt.py", put_top_p(GPT_SOURCE, RIGHT_TOP_P[name], inline)).sample) == ""


@pytest.mark.parametrize("name, inline", [(name, i % 2 == 1) for i, name in enumerate(WRONG_TOP_P)])
def test_a_wrong_top_p_fails_with_its_sentence(name, inline):
    body, word = WRONG_TOP_P[name]
    sentence = judge_top_p(load("gpt.py", put_top_p(GPT_SOURCE, body, inline)).sample)
    assert sentence.startswith("top-p 还不对") and "缺的一步" in sentence and word in sentence and "\n" not in sentence, sentence


@pytest.mark.parametrize("name", RIGHT_QUATRAIN)
def test_a_right_quatrain_passes(name):
    assert judge_quatrain(load("generate.py", put(GENERATE_SOURCE, "quatrain", RIGHT_QUATRAIN[name]))) == ""


@pytest.mark.parametrize("name", WRONG_QUATRAIN)
def test_a_wrong_quatrain_fails_with_its_sentence(name):
    answer, word = WRONG_QUATRAIN[name]
    sentence = judge_quatrain(load("generate.py", put(GENERATE_SOURCE, "quatrain", answer)))
    assert sentence.startswith("quatrain 还不对") and "缺的一步" in sentence and word in sentence and "\n" not in sentence, sentence


def test_two_functions_of_one_name_are_said():
    assert doubled("def f():\n    pass\n", "f") == ""
    assert "2 个 f（第 1、3 行）" in doubled("def f():\n    pass\ndef f():\n    pass\n", "f")


def copy_all(folder):
    """整份课程，连同测试，就像读者的文件夹。"""
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "venv", "*.tmp"))


def lesson_with_answers(folder, top_p, quatrain):
    """读者的文件夹：课程的一份副本，里面是读者的答案和 README 建议的改动，一样也不少。"""
    copy_all(folder)
    source = {name: (folder / name).read_text(encoding="utf-8") for name in ("gpt.py", "train.py", "generate.py")}
    source["gpt.py"] = put_keep_top_p(source["gpt.py"], top_p)
    source["generate.py"] = put(source["generate.py"], "quatrain", quatrain)
    for name, constant, value in (("gpt.py", "block_size", 512), ("train.py", "RESUME", True), ("train.py", "BATCH_SIZE", 3),
                                  ("generate.py", "TOP_P", 0.9), ("generate.py", "QUATRAIN", True),
                                  ("generate.py", "LENGTHS", (32, 64, 120, 500))):
        source[name] = set_constant(source[name], constant, value)
    for name, text in source.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return folder


def start_pytest(folder, *arguments, **environ):
    environ = {**{name: value for name, value in os.environ.items() if name != "CI"}, **environ}
    return kill_later(subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), seconds=1200)


def finish(process):
    """(退出码, 打印的)。"""
    out = process.communicate()[0].decode("utf-8")
    return process.returncode, out


# 看答案、常量和 ckpt.pt 的几个文件；其中和答案没有关系、又要好几秒的，不必再来一遍
HALVES = (("claims", "edits", "readme"), ("exercises", "generate", "gpt"))
OFTEN_ENOUGH = ("losses", "smaller_seed", "exercise_3", "other_machines", "other_values", "cannot_be", "ctrl_c")


def run_suite(folder):
    """在 folder 里运行这些测试，两半一起跑：[(退出码, 打印的), …]。"""
    choice = ("-k", " and ".join(f"not {name}" for name in OFTEN_ENOUGH))
    return [finish(process) for process in
            [start_pytest(folder, *choice, *(f"tests/test_{name}.py" for name in half)) for half in HALVES]]


def test_what_a_learner_reads_who_asks(tmp_path):
    folder = lesson_with_answers(tmp_path / "a", WRONG_TOP_P["drops_the_crossing"][0], WRONG_QUATRAIN["only_bans"][0])
    code, out = finish(start_pytest(folder, "tests/test_exercises.py"))
    assert code == 1 and "2 failed" in out and "Traceback" not in out
    assert "跨过 p 的那个字也要留下" in out and "只禁止还不够" in out


@pytest.mark.slow
def test_the_suite_is_green_with_the_learner_s_answers_and_edits(tmp_path):
    folder = lesson_with_answers(tmp_path / "a", RIGHT_TOP_P["shift"], RIGHT_QUATRAIN["without_the_end"])
    for code, out in run_suite(folder):
        assert code == 0, out


@pytest.mark.slow
def test_with_a_checkpoint_of_the_learner_s_own_its_tests_are_skipped_but_not_in_ci(small, tmp_path):
    small.edit("gpt.py", block_size=64)
    assert small.run_here("train.py")[0] == 0
    folder = copy_all(tmp_path / "a")
    shutil.copy(small.folder / "ckpt.pt", folder / "ckpt.pt")
    results = run_suite(folder)
    for code, out in results:
        assert code == 0, out
    assert any("ckpt.pt 不是课程自带的" in out for _, out in results)
    code, out = finish(start_pytest(folder, "tests/test_claims.py", "tests/test_edits.py", "-k", "claims or plain", CI="true"))
    assert code == 1 and "skipped" not in out, out
