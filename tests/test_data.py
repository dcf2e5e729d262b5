"""语料：课文里说到的每个数字，和 data/prepare.py。"""
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter

import pytest

from conftest import ROOT

RAW = (ROOT / "data" / "poems.txt").read_bytes()
TEXT = RAW.decode("utf-8")
POEMS = TEXT.split("\n")[:-1]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """data/prepare.py，只是写到临时文件夹里。"""
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "data" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUT", tmp_path / "poems.txt")
    return module


def test_file():
    assert hashlib.sha256(RAW).hexdigest() == "70f39b9a90e28b17350429bd1e0eb6c3748eaffd73f6a3403d112a4af618c8fc"
    assert TEXT.endswith("。\n") and "\r" not in TEXT and len(set(POEMS)) == len(POEMS)


def test_numbers_of_the_lesson():
    assert len(POEMS) == 35_135 and len(TEXT) == 1_592_911 and len(set(TEXT)) == 6_289
    assert TEXT.count("春风") == 797 and TEXT.count("春风。") == 111 and f"{111 / 797:.1%}" == "13.9%"
    assert "床前看月光，疑是地上霜。举头望山月，低头思故乡。" in POEMS
    assert "床前明月光" not in TEXT and "人工智能" not in TEXT and all(ch in TEXT for ch in "人工智能")


def test_forms():
    forms = Counter()
    for poem in POEMS:
        lines = re.split("[，。]", poem)[:-1]
        n_char = len(lines[0])
        assert len(lines) in (4, 8) and n_char in (5, 7)
        assert re.fullmatch(f"(?:[\u4e00-\u9fff]{{{n_char}}}，[\u4e00-\u9fff]{{{n_char}}}。)+", poem)
        forms[len(lines), n_char] += 1
    assert forms == {(4, 5): 3_656, (4, 7): 10_087, (8, 5): 13_865, (8, 7): 7_527}


def write_tgz(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, poems in files.items():
            raw = json.dumps(poems, ensure_ascii=False).encode("utf-8")
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


SOURCE = {
    "package/dist/quantangshi/poet.tang.10000.json": [{"paragraphs": ["丁"]}],
    "package/dist/quantangshi/poet.tang.2000.json": [{"paragraphs": ["甲", "乙"]}, {"paragraphs": ["丙"]}],
    "package/dist/quantangshi/poet.song.0.json": [{"paragraphs": ["宋"]}],
    "package/dist/quantangshi/error/poet.tang.0.json": [{"paragraphs": ["错"]}],
    "package/dist/strains/json/poet.tang.0.json": [{"strains": ["平"]}]}


@pytest.mark.parametrize("place", ["tgz", "package", "git", "quantangshi"])
def test_reads_the_package_and_the_repository(prepare, tmp_path, monkeypatch, place):
    path = tmp_path / "source.tgz"
    write_tgz(path, SOURCE)
    if place != "tgz":
        with tarfile.open(path) as tar:
            tar.extractall(tmp_path, filter="data") if sys.version_info >= (3, 12) else tar.extractall(tmp_path)
        path = tmp_path / "package"
        if place == "git":
            (path / "dist" / "quantangshi").rename(path / "全唐诗")
        if place == "quantangshi":
            path = path / "dist" / "quantangshi"
    monkeypatch.setattr(prepare, "N_SOURCE", 3)
    assert prepare.read_poems(prepare.read_source(path)) == ["甲乙", "丙", "丁"]


def test_which_poems_are_kept(prepare):
    five, seven = "白日依山尽，黄河入海流。", "朝辞白帝彩云间，千里江陵一日还。"
    keep, drop = prepare.REGULAR.fullmatch, []
    assert all(keep(half * n) for half in (five, seven) for n in (2, 4))
    drop += [five, five * 3, five * 5, five + seven, five * 2 + "。", five.replace("。", "，") * 2, "□日依山尽，黄河入海流。" * 2]
    assert not any(map(keep, drop))


@pytest.mark.parametrize("source, word", [
    ("missing", "npm pack"), ("not a tar", "重新下载"), ("cut off", "重新下载"), ("empty", "quantangshi"), ("too few", "57,607"),
    ("broken json", "重新下载"), ("zip", "是 .zip 文件"), ("two copies", "有 2 份")])
def test_a_source_that_will_not_do(prepare, tmp_path, monkeypatch, source, word):
    path = tmp_path / "source.tgz"
    prepare.OUT.write_text("old")
    if source == "not a tar":
        path.write_bytes(b"<html>404</html>")
    elif source != "missing":
        files = {"package/README.md": []} if source == "empty" else {**SOURCE, "package/dist/quantangshi/poet.tang.5.json": "诗"} \
            if source == "broken json" else SOURCE
        if source == "two copies":
            files = {**SOURCE, **{name.replace("dist/quantangshi", "全唐诗"): poems for name, poems in SOURCE.items()}}
        write_tgz(path, files)
        if source == "cut off":
            path.write_bytes(path.read_bytes()[:200])
        if source == "zip":
            with zipfile.ZipFile(path, "w") as z:
                z.writestr("dist/quantangshi/poet.tang.0.json", "[]")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(path)])
    with pytest.raises(SystemExit, match=word):
        prepare.main()
    assert prepare.OUT.read_text() == "old"


def test_other_text_is_not_written(prepare, tmp_path, monkeypatch):
    write_tgz(tmp_path / "source.tgz", SOURCE)
    prepare.OUT.write_text("old")
    monkeypatch.setattr(prepare, "N_SOURCE", 3)
    monkeypatch.setattr(prepare, "simplify", lambda poems: ["白日依山尽，黄河入海流。" * 2] * 3)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "source.tgz")])
    with pytest.raises(SystemExit, match="SHA-256"):
        prepare.main()
    assert prepare.OUT.read_text() == "old"


def test_writes_the_file(prepare, tmp_path, monkeypatch):
    write_tgz(tmp_path / "source.tgz", SOURCE)
    monkeypatch.setattr(prepare, "N_SOURCE", 3)
    monkeypatch.setattr(prepare, "simplify", lambda poems: ["不成诗", *POEMS[:1000], *POEMS])  # 重复的只留第一首
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "source.tgz")])
    prepare.main()
    assert prepare.OUT.read_bytes() == RAW and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written(prepare, tmp_path, monkeypatch):
    write_tgz(tmp_path / "source.tgz", SOURCE)
    monkeypatch.setattr(prepare, "N_SOURCE", 3)
    monkeypatch.setattr(prepare, "simplify", lambda poems: POEMS)
    monkeypatch.setattr(prepare, "OUT", tmp_path / "nowhere" / "poems.txt")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "source.tgz")])
    with pytest.raises(SystemExit, match="写不了 .*poems.txt.*没有动"):
        prepare.main()


def test_one_sentence_without_a_traceback():
    done = subprocess.run([sys.executable, ROOT / "data" / "prepare.py"], capture_output=True)
    error = done.stderr.decode("utf-8")
    assert done.returncode == 1 and error.startswith("用法") and len(error.splitlines()) == 1
