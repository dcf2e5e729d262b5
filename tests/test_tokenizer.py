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


@pytest.mark.parametrize("text, unknown, hint", [
    ("白,日", ",", "全角的 ，"), ("山.", ".", "全角的 。"), ("山?", "?", "全角的 。"), ("山!", "!", "全角的 。"),
    ("白A", "A", "出现过"), ("山🙂", "🙂", "出现过"), ("牀", "牀", "简体"), ("AB白A🙂日B", "A B 🙂", "出现过"),
    ("白 日", "U+0020", ""), ("白\u200b日", "U+200B", ""), ("白\u3000日", "U+3000", ""), ("白\ud800日", "U+D800", ""),
    ("\ufeff白", "U+FEFF", ""), ("白\t日\r", "U+0009 U+000D", "")])
def test_unknown_characters_are_named_once_with_a_way_out(text, unknown, hint):
    tokenizer = Tokenizer.from_text("白日依山，。")
    with pytest.raises(ValueError) as error:
        tokenizer.encode(text)
    sentence = str(error.value)
    assert f"没有的字：{unknown}。" in sentence and hint in sentence
    sentence.encode("utf-8")  # 落单的代理项写成编码，打印时不会再出错
    assert tokenizer.explain_unknown(text) == sentence and tokenizer.explain_unknown("白日") == ""
