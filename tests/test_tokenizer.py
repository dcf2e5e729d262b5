import pytest

from tokenizer import Tokenizer


def test_round_trip():
    tokenizer = Tokenizer.from_text("白日依山尽，黄河入海流。\n")
    text = "黄河流，\n白日。"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_ids_follow_sorted_characters():
    tokenizer = Tokenizer.from_text("cab a\n")
    assert tokenizer.chars == ["\n", " ", "a", "b", "c"] and len(tokenizer) == 5
    assert tokenizer.encode("abc") == [2, 3, 4]
    assert Tokenizer(tokenizer.chars).encode("abc") == [2, 3, 4]


@pytest.mark.parametrize("text, unknown, hint", [
    ("白,日", ",", "，"), ("山.", ".", "。"), ("山?", "?", "。"), ("山!", "!", "。"), ("白A", "A", ""), ("山🙂", "🙂", ""),
    ("牀", "牀", "简体")])
def test_unknown_character_is_named_with_a_way_out(text, unknown, hint):
    with pytest.raises(ValueError) as error:
        Tokenizer.from_text("白日依山，。").encode(text)
    assert f"没有的字：{unknown}" in str(error.value) and hint in str(error.value)


def test_every_unknown_character_is_named_once():
    with pytest.raises(ValueError, match="没有的字：A B 🙂。"):
        Tokenizer.from_text("白日").encode("AB白A🙂日B")


@pytest.mark.parametrize("ids", [[5], [-1], [0, 99]])
def test_unknown_id(ids):
    with pytest.raises(ValueError, match=f"{ids[-1]} .*0 到 4"):
        Tokenizer("一二三四五").decode(ids)


@pytest.mark.parametrize("chars", ["", "一一", ["一二"]])
def test_bad_vocabulary(chars):
    with pytest.raises(ValueError, match="词表"):
        Tokenizer(chars)
