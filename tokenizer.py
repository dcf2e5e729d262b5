"""分词器：一个字（标点、换行也算）就是一个词元。

词表是语料里出现过的全部不同的字符，按编码排序；编号就是它在词表里的位置。
"""

# 学员最常打错的半角标点，和语料里对应的全角标点
FULL_WIDTH = {",": "，", ".": "。", "?": "。", "!": "。", "？": "。", "！": "。"}


class Tokenizer:
    """在文字和编号之间转换。

    chars：词表，不重复的单个字符，第 i 个字符的编号是 i。词表为空或有重复时抛出 ValueError。
    """

    def __init__(self, chars):
        self.chars = list(chars)
        self.ids = {ch: i for i, ch in enumerate(self.chars)}
        if not self.chars or len(self.ids) != len(self.chars) or any(len(ch) != 1 for ch in self.chars):
            raise ValueError(f"词表应为不重复的单个字符，得到 {len(self.chars)} 个，其中不同的 {len(self.ids)} 个")

    @classmethod
    def from_text(cls, text):
        """用一段文字里出现过的全部字符做词表，按编码从小到大编号。"""
        return cls(sorted(set(text)))

    def __len__(self):
        return len(self.chars)

    def encode(self, text):
        """文字 -> 编号，list[int]，长度等于字数。有词表里没有的字时抛出 ValueError，一次说全。"""
        unknown = [ch for ch in dict.fromkeys(text) if ch not in self.ids]
        if unknown:
            raise ValueError(self._explain(unknown, text))
        return [self.ids[ch] for ch in text]

    def decode(self, ids):
        """编号 -> 文字，str。编号不在 0 到 len(self) - 1 之间时抛出 ValueError。"""
        ids = [int(i) for i in ids]
        wrong = [i for i in ids if not 0 <= i < len(self)]
        if wrong:
            raise ValueError(f"编号 {wrong[0]} 不在词表里，应为 0 到 {len(self) - 1}")
        return "".join(self.chars[i] for i in ids)

    def _explain(self, unknown, text):
        """为词表外的字写一句话：是哪些字，怎么改。"""
        hints = [f"{ch} 请换成全角的 {FULL_WIDTH[ch]}" for ch in unknown if ch in FULL_WIDTH]
        if any("\u4e00" <= ch <= "\u9fff" for ch in unknown):
            hints.append("语料是简体字，繁体字请换成简体")
        return (f"{text!r} 里有词表里没有的字：{' '.join(unknown)}。" + "".join(f"{hint}；" for hint in hints)
                + "请换成《全唐诗》里出现过的字")
