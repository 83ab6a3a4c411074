"""Text to a corpus: a folder with `train` and `validation` token files (and the BPE file), built once and never changed.

The default corpus is the source text of the running Python's own standard library, about 11 MB: it needs no download.
Its exact bytes depend on the Python version, so the header records the version and the hash of the tokens.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from minidist.data import tokenizer as tokenizers
from minidist.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from minidist.data.tokens import TokenFile

HELD_OUT = 0.04  # part of the documents that training never sees
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}  # of the standard library
STDLIB = "stdlib"  # the name of the default corpus


@dataclass(frozen=True)
class Document:
    """A piece of text. `name` (a relative path) decides whether it is held out."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """An opened corpus folder."""

    path: Path
    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def home() -> Path:
    """Where minidist keeps what it builds: $MINIDIST_HOME, or ~/.cache/minidist."""
    return Path(os.environ.get("MINIDIST_HOME") or Path.home() / ".cache" / "minidist")


def load(source: str = STDLIB, tokenizer: str = "byte") -> Corpus:
    """The corpus at `source`: "stdlib" for the default one, built on first use, or a folder that `build` made."""
    return default(tokenizer) if source in ("", STDLIB) else open_folder(source)


def open_folder(folder: str | Path) -> Corpus:
    """Open what `build` made. Raises ValueError when something is missing or does not fit its header."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data.source={folder}: no such folder; build it with `minidist data build SRC --out {folder}`")
    train, validation = TokenFile(folder / "train"), TokenFile(folder / "validation")
    return Corpus(folder, train, validation, tokenizers.load(train.header["tokenizer"], folder))


def default(tokenizer: str = "byte") -> Corpus:
    """The standard library's own source as a corpus, under `home()`. Any number of processes may ask at once."""
    tokenizers.parse(tokenizer)
    folder = home() / "corpus" / f"stdlib-{platform.python_version()}-{tokenizer.replace(':', '-')}"
    if not folder.is_dir():
        documents = list(read_stdlib())
        if not documents:
            raise ValueError("data.source: this Python came without its library's source text; give data.source a text corpus")
        source = f"the standard library of Python {platform.python_version()}"
        remedy = "set MINIDIST_HOME to a folder that you may write to"
        _publish(documents, folder, tokenizer, {"source": source, "skipped": 0}, remedy, may_exist=True)
    return open_folder(folder)


def build(source: str | Path, out: str | Path, tokenizer: str = "byte") -> Corpus:
    """Make a corpus at `out` of the text file or folder `source`; `tokenizer` is "byte" or "bpe:N".

    A folder gives one document per file, in order of relative path; hidden files, and files that are not UTF-8 text, are
    left out, and the header says how many ("skipped"). A single file must be UTF-8 and is one document. Raises
    ValueError on a missing or empty source, and when `out` exists.
    """
    source, out = Path(source), Path(out)
    tokenizers.parse(tokenizer)
    if out.exists():
        raise ValueError(f"--out {out}: already exists; remove it, or choose another name")
    if source.is_dir():
        documents, skipped = _read_folder(source)
    elif source.is_file():
        documents, skipped = [Document(source.name, _read_file(source))], 0
    else:
        raise ValueError(f"{source}: no such file or folder; give a text file, or a folder of them")
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        left = f" ({skipped} files are not UTF-8 text)" if skipped else ""
        raise ValueError(f"{source}: there is no text in it{left}; give UTF-8 text that is not empty")
    header = {"source": source.name, "skipped": skipped}
    _publish(documents, out, tokenizer, header, "choose another --out", may_exist=False)
    return open_folder(out)


def read_stdlib() -> Iterator[Document]:
    """The running Python's library modules, in order of path, without tests, idlelib and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        name = path.relative_to(root)
        if not LEFT_OUT.intersection(name.parts):
            text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")  # a few modules are in Latin-1
            if text.strip():  # many an __init__.py is empty
                yield Document(name.as_posix(), text)


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(train, validation) by a hash of each document's name, so that adding files moves no other across.

    With so few documents that the hash leaves either part empty, the end of each document is held out instead.
    """
    held = [int.from_bytes(blake2b(d.name.encode(), digest_size=8).digest(), "little") < HELD_OUT * 2**64 for d in documents]
    if any(held) and not all(held):
        train = [d for d, out in zip(documents, held, strict=True) if not out]
        return train, [d for d, out in zip(documents, held, strict=True) if out]
    cuts = [_tail(document.text) for document in documents]
    train = [Document(d.name, d.text[:cut]) for d, cut in zip(documents, cuts, strict=True)]
    return train, [Document(d.name, d.text[cut:]) for d, cut in zip(documents, cuts, strict=True)]


def _tail(text: str) -> int:
    """Where the held-out end of a text begins: after the last line end before its final 4 %."""
    cut = int(len(text) * (1 - HELD_OUT))
    line = text.rfind("\n", cut // 2, cut) + 1
    return line or cut


def _publish(documents: list[Document], out: Path, tokenizer: str, header: dict, remedy: str, may_exist: bool) -> None:
    """Build beside `out` under a name of our own, then rename: nobody ever sees half a corpus, or two writers mixed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror}); {remedy}") from None
    try:
        train, validation = split(documents)
        coder = _tokenizer(tokenizer, train, work)
        for name, part in (("train", train), ("validation", validation)):
            encoded = (coder.encode(document.text) for document in part)
            TokenFile.build(work / name, encoded, coder.vocab, coder.separator, tokenizer=coder.name, part=name, **header)
        work.chmod(0o755)  # mkdtemp makes it private
        try:
            work.rename(out)
        except OSError:
            if not (may_exist and out.is_dir()):  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _tokenizer(name: str, train: list[Document], folder: Path) -> Tokenizer:
    """The tokenizer called `name`; BPE is learnt from the training part only, and saved in `folder`."""
    size = tokenizers.parse(name)
    if size is None:
        return ByteTokenizer()
    return BPETokenizer.train((document.text for document in train), size, folder / tokenizers.BPE_FILE)


def _read_folder(root: Path) -> tuple[list[Document], int]:
    """(documents, files left out) of a folder and its subfolders."""
    documents, skipped = [], 0
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts):
        name = path.relative_to(root)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        try:
            documents.append(Document(name.as_posix(), _read_file(path)))
        except ValueError:
            skipped += 1
    return documents, skipped


def _read_file(path: Path) -> str:
    """The text of a file. Raises ValueError if it is not UTF-8 or holds a NUL."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; convert it, as in `iconv -f latin1 -t utf-8`") from None
    if "\0" in text:
        raise ValueError(f"{path}: has a NUL character, so it is not text; leave it out")
    return text
