"""把 npm 包 chinese-poetry 里的《全唐诗》整理成 data/poems.txt。

课程自带整理好的 poems.txt，一般不用运行这个脚本。想自己重做一遍：

    npm pack chinese-poetry@2.0.1
    python -m pip install opencc
    python data/prepare.py chinese-poetry-2.0.1.tgz

参数是下载来的 .tgz，或者解开的文件夹（npm 包、上游 git 仓库都可以）。脚本自己不上网。
"""
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

OUT = Path(__file__).resolve().with_name("poems.txt")
N_SOURCE = 57_607  # 2.0.1 版《全唐诗》的篇数
SHA256 = "70f39b9a90e28b17350429bd1e0eb6c3748eaffd73f6a3403d112a4af618c8fc"
# npm 包放在 dist/quantangshi，git 仓库放在 全唐诗；同名的 strains（平仄）、error 文件夹不要
SOURCE = re.compile(r"(?:^|/)(?:quantangshi|全唐诗)/poet\.tang\.(\d+)\.json$")
# 五言或七言，一联两句，逗号在前、句号在后；四句是两联，八句是四联
HAN = "[\u4e00-\u9fff]"
REGULAR = re.compile("|".join(f"(?:{HAN}{{{n}}}，{HAN}{{{n}}}。){{{couplets}}}"
                              for n in (5, 7) for couplets in (2, 4)))


def read_source(path):
    """读出《全唐诗》的各个 JSON 文件，返回 list[(文件名, bytes)]，按文件名里的数字排序。

    path：.tgz 文件或解开的文件夹。找不到、打不开或里面没有《全唐诗》时用一句话结束。
    """
    path = Path(path).resolve()
    give = "请给出 chinese-poetry 2.0.1 的 .tgz（npm pack chinese-poetry@2.0.1）或解开的文件夹"
    if path.is_dir():
        files = {p.as_posix(): p.read_bytes() for p in path.rglob("poet.tang.*.json")
                 if SOURCE.search(p.as_posix())}
    elif not path.exists():
        sys.exit(f"找不到 {path}，{give}")
    elif zipfile.is_zipfile(path):
        sys.exit(f"{path} 是 .zip 文件，请先解开，再给出解开的文件夹")
    else:
        try:
            with tarfile.open(path) as tar:
                files = {m.name: tar.extractfile(m).read() for m in tar
                         if m.isfile() and SOURCE.search(m.name)}
        except (tarfile.TarError, EOFError, OSError, zlib.error) as e:
            sys.exit(f"{path} 不是完整的 .tgz 文件（{e}），请重新下载：{give}")
    folders = sorted({name.rpartition("/")[0] for name in files})
    if not folders:
        sys.exit(f"{path} 里没有 quantangshi/poet.tang.*.json"
                 f"（git 仓库里是 全唐诗/poet.tang.*.json），{give}")
    if len(folders) > 1:
        sys.exit(f"{path} 里有 {len(folders)} 份《全唐诗》：{'、'.join(folders)}，请只给出其中一份")
    return sorted(files.items(), key=lambda item: int(SOURCE.search(item[0])[1]))


def read_poems(files):
    """各个 JSON 文件里的诗，返回 list[str]（繁体，一首一个）；篇数不对时用一句话结束。"""
    poems = []
    for i, (name, raw) in enumerate(files, 1):
        try:
            poems += ["".join(poem["paragraphs"]) for poem in json.loads(raw)]
        except (ValueError, KeyError, TypeError) as e:
            sys.exit(f"{name} 读不出诗来（{e!r}），文件可能不完整，请重新下载 chinese-poetry 2.0.1")
        if i % 10 == 0 or i == len(files):
            print(f"读了 {i}/{len(files)} 个文件，{len(poems):,} 首", flush=True)
    if len(poems) != N_SOURCE:
        sys.exit(f"《全唐诗》应有 {N_SOURCE:,} 首，这里有 {len(poems):,} 首："
                 "缺了文件，或者不是 2.0.1 版")
    return poems


def simplify(poems):
    """繁体转简体（OpenCC 的 t2s），返回 list[str]；没有装 opencc 时用一句话结束。"""
    try:
        from opencc import OpenCC
    except ImportError:
        sys.exit("缺少 opencc，请先运行 python -m pip install opencc")
    print("繁体转简体……", flush=True)
    return OpenCC("t2s").convert("\n".join(poems)).split("\n")


def main():
    if len(sys.argv) != 2:
        sys.exit("用法：python data/prepare.py chinese-poetry-2.0.1.tgz（或解开的文件夹）")
    poems = simplify(read_poems(read_source(sys.argv[1])))
    poems = [poem for poem in poems if REGULAR.fullmatch(poem)]
    poems = list(dict.fromkeys(poems))  # 去掉重复的，留第一首
    text = "\n".join(poems) + "\n"
    raw = text.encode("utf-8")
    print(f"{len(poems):,} 首，{len(text):,} 个字符（算上换行），{len(set(text)):,} 个不同的字符，"
          f"「春风」{text.count('春风')} 次，后面是句号的 {text.count('春风。')} 次")
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHA256:
        sys.exit(f"SHA-256 是 {digest}，应为 {SHA256}，{OUT.name} 没有改动："
                 "来源要用 chinese-poetry 2.0.1，转换要用 PyPI 的 opencc（1.4.2 核对过）")
    temporary = OUT.with_name(f"{OUT.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(raw)
        os.replace(temporary, OUT)  # 一步换上：中途断了，旧文件还在
    except OSError as e:
        sys.exit(f"写不了 {OUT}（系统说：{e.strerror}），原来的文件没有动；"
                 f"请看看磁盘满没满、文件夹 {OUT.parent} 能不能写")
    finally:
        with contextlib.suppress(OSError):  # 删不掉也没有关系
            temporary.unlink(missing_ok=True)
    print(f"写好了 {OUT}")


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\n已停止，poems.txt 没有改动。")
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EPIPE, errno.EINVAL):  # Windows 上管道断了是 EINVAL
            raise
        sys.stdout = None  # 不再打印
        sys.exit("没有打印完：磁盘满了，或者接收输出的程序先结束了")
