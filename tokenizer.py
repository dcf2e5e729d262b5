"""分词器：一个字（标点、换行也算）就是一个词元。

词表是语料里出现过的全部不同的字符，按编码排序；编号就是它在词表里的位置。
"""
FULL_WIDTH = {",": "，", ".": "。", "?": "。", "!": "。", "？": "。", "！": "。"}  # 语料里对应的标点


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
        names = [ch if ch.isprintable() and ch != " " else f"U+{ord(ch):04X}" for ch in unknown]  # 看不见的写编码
        hints = [f"{ch} 请换成全角的 {FULL_WIDTH[ch]}；" for ch in unknown if ch in FULL_WIDTH]
        if any("\u4e00" <= ch <= "\u9fff" for ch in unknown):
            hints.append("语料是简体字，繁体字请换成简体；")
        return (f"{text!r} 里有词表里没有的字：{' '.join(names)}。{''.join(hints)}"
                "请换成《全唐诗》里出现过的字")
