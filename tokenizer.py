"""分词器：一个字（标点、换行也算）就是一个词元。

词表是语料里出现过的全部不同的字符，按编码排序；编号就是它在词表里的位置。
"""
import unicodedata


class Tokenizer:
    """在文字和编号之间转换。chars：词表，不重复的单个字符，第 i 个字符的编号是 i。"""

    def __init__(self, chars):
        self.chars = list(chars)
        self.ids = {ch: i for i, ch in enumerate(self.chars)}

    @classmethod
    def from_text(cls, text):
        """用一段文字里出现过的全部字符做词表，按编码从小到大编号。"""
        return cls(sorted(set(text)))

    def __len__(self):
        return len(self.chars)

    def encode(self, text):
        """文字 -> 编号，list[int]，长度等于字数。有词表里没有的字时抛出 ValueError，一次说全。"""
        if unknown := self.explain_unknown(text):
            raise ValueError(unknown)
        return [self.ids[ch] for ch in text]

    def decode(self, ids):
        """编号 -> 文字，str。"""
        return "".join(self.chars[i] for i in ids)

    def explain_unknown(self, text):
        """text 里有哪些词表里没有的字，怎么改，写成一句话；都有时是空字符串。"""
        unknown = [ch for ch in dict.fromkeys(text) if ch not in self.ids]
        if not unknown:
            return ""
        names = "、".join(describe(ch, self.ids) for ch in unknown)
        hint = "繁体和简体是不同的字，" if any("\u4e00" <= ch <= "\u9fff" for ch in unknown) else ""
        return f"{text!r} 里有词表里没有的字：{names}。{hint}请换成训练用的语料里出现过的字"


# 以下只管说清楚错在哪里，课文不讲
FULL_WIDTH = {",": "，", ".": "。", "?": "。", "!": "。", "？": "。", "！": "。"}  # 语料里用的标点


def describe(ch, ids):
    """词表 ids 不认识的字 ch：看不见的、样子像别的字的，写出编码；词表里有该换成的字，就说出来。"""
    standard = unicodedata.normalize("NFKC", ch)  # 部首 ⽩ 的标准写法是汉字 白，全角 ｖ 的是 v
    name = ch if ch.isprintable() and ch != " " else "看不见的字符"
    if name != ch or standard != ch:
        name += f" U+{ord(ch):04X}"
    for right in (FULL_WIDTH.get(ch), standard):
        if right in ids:
            return f"{name}（请换成 {right}）"
    return name
