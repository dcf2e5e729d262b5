"""分词器。"""
import pytest

from tokenizer import Tokenizer


def test_round_trip_and_ids_in_sorted_order():
    tokenizer = Tokenizer.from_text("白日依山尽，黄河入海流。\n")
    text = "黄河流，\n白日。"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.chars == sorted(set("白日依山尽，黄河入海流。\n")) and len(tokenizer) == 13
    assert [tokenizer.chars[i] for i in tokenizer.encode(text)] == list(text)
    assert Tokenizer(tokenizer.chars).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("text, unknown", [
    ("白,日", ",（请换成 ，）"), ("山.", ".（请换成 。）"), ("山?", "?（请换成 。）"), ("山？", "？ U+FF1F（请换成 。）"), ("白A", "A"),
    ("山🙂", "🙂"), ("AB白A🙂日B", "A、B、🙂"), ("白 日", "看不见的字符 U+0020"), ("白\u200b日", "看不见的字符 U+200B"),
    ("白\ud800日", "看不见的字符 U+D800"), ("⽩⽇山", "⽩ U+2F69（请换成 白）、⽇ U+2F47（请换成 日）"), ("ｖ", "ｖ U+FF56"),
    ("牀", "牀")])
def test_unknown_characters_are_named_once_with_a_way_out(text, unknown):
    tokenizer = Tokenizer.from_text("白日依山，。")
    with pytest.raises(ValueError) as error:
        tokenizer.encode(text)
    sentence = str(error.value)
    assert f"没有的字：{unknown}。" in sentence and sentence.endswith("请换成训练用的语料里出现过的字")
    assert ("繁体和简体" in sentence) == (unknown == "牀")
    sentence.encode("utf-8")  # 落单的代理项写成编码，打印时不会再出错
    assert tokenizer.explain_unknown(text) == sentence and tokenizer.explain_unknown("白日") == ""


def test_what_is_said_is_true_of_another_corpus():
    """语料用半角标点、全角字母时，不劝人换成语料里没有的字。"""
    tokenizer = Tokenizer.from_text("床前,v.\n")
    assert "，" in tokenizer.explain_unknown("床，") and "（请换成 ,）" in tokenizer.explain_unknown("床，")
    assert "ｖ U+FF56（请换成 v）" in tokenizer.explain_unknown("ｖ") and "请换成 。" not in tokenizer.explain_unknown("?")
