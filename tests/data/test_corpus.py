"""Corpora: the default one, text files and folders, both tokenizers, token files, racing builders, and bad input."""

import hashlib
import json
import multiprocessing
import platform
from pathlib import Path

import numpy as np
import pytest

from minidist.data import TokenFile, corpus
from minidist.data.corpus import Document, build, split
from minidist.data.tokenizer import BPETokenizer, ByteTokenizer, parse
from minidist.data.tokens import dtype_for

TEXT = "def f(x):\n    return x + 1  # größer 数 🙂\n\n\tindented\twith\ttabs  \n"


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The default corpus, built once for this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDIST_HOME", str(tmp_path_factory.mktemp("home")))
        yield corpus.default()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 small text files in two folders, one hidden, one binary, one in Latin-1."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for i in range(60):
        (root / ("sub" if i % 2 else ".") / f"{i:02}.txt").write_text(f"file {i}\n" + TEXT * 3, encoding="utf-8")
    (root / ".hidden").write_text("secret")
    (root / "image.bin").write_bytes(b"\x00\x01\x02")
    (root / "latin.txt").write_bytes("größer".encode("latin-1"))
    return root


def test_default_corpus(default):
    """Megabytes of this Python's library, about 4 % of it held out by document, hash and version in the header."""
    train, held_out = default.train.header, default.validation.header
    assert 8e6 < train["tokens"] + held_out["tokens"] < 20e6
    assert 0.01 < held_out["tokens"] / train["tokens"] < 0.08 and held_out["documents"] > 10
    assert train["source"].endswith(platform.python_version()) and train["tokenizer"] == "byte"
    default.train.verify()
    assert train["sha256"] == hashlib.sha256(default.train.array.tobytes()).hexdigest()
    texts = {d.name: d.text for d in corpus.read_stdlib()}
    assert len(texts) == train["documents"] + held_out["documents"]
    assert "json/decoder.py" in texts and not any({"test", "idlelib", "site-packages"} & set(n.split("/")) for n in texts)
    for part in (default.train, default.validation):
        assert part.array[0] == 0 and part.array[-1] == 0 and (part.array == 0).sum() == part.header["documents"] + 1
    first = ByteTokenizer().decode(default.train.array[1 : default.train.array[1:].argmin() + 1])
    assert first in texts.values()


def test_default_is_built_once_and_the_same_again(default, tmp_path, monkeypatch):
    """A second call opens; a second build elsewhere gives the same bytes."""
    before = (default.path / "train.bin").stat().st_mtime_ns
    monkeypatch.setenv("MINIDIST_HOME", str(default.path.parent.parent))
    assert (corpus.load().path / "train.bin").stat().st_mtime_ns == before
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path))
    again = corpus.default()
    assert again.path.parent.parent == tmp_path and again.train.header == default.train.header
    assert [p.name for p in again.path.parent.iterdir()] == [again.path.name]  # no temporary folder left


def _build_default(barrier, home, results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDIST_HOME", home)
        patch.setattr(corpus, "read_stdlib", lambda: (Document(f"{i}.py", TEXT * 50) for i in range(200)))
        barrier.wait()
        results.put(corpus.default().train.header["sha256"])


def test_builders_at_the_same_moment(tmp_path):
    """Four processes ask for a corpus that is not there: each gets the same whole one, and nothing is left beside it."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_build_default, args=(barrier, str(tmp_path), results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    hashes = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert len(set(hashes)) == 1
    assert len(list((tmp_path / "corpus").iterdir())) == 1


def test_default_needs_a_home_and_a_library(tmp_path, monkeypatch):
    """A home that cannot be made, and a Python that came without its sources: said, with the way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(corpus, "read_stdlib", lambda: iter([Document("a.py", TEXT)]))
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path / "file"))
    with one_line("cannot be written .*set MINIDIST_HOME"):
        corpus.default()
    monkeypatch.setattr(corpus, "read_stdlib", lambda: iter([]))
    with one_line("without its library's source text; give data.source"):
        corpus.default()


def test_build_of_a_folder(folder, tmp_path):
    """One document a file in order of path; hidden files unseen; what is not text is counted, not silently lost."""
    made = build(folder, tmp_path / "out")
    assert made.train.header["documents"] + made.validation.header["documents"] == 60
    assert made.train.header["skipped"] == 2 and made.validation.header["documents"] > 0
    texts = made.tokenizer.decode(made.train.array).split("\0")[1:-1]
    assert all(t.endswith(TEXT) for t in texts) and texts[0].startswith("file 0\n")
    assert build(folder, tmp_path / "again").train.header == made.train.header
    assert corpus.load(str(tmp_path / "out")).path == tmp_path / "out"


def test_adding_files_moves_none_across(folder):
    """Held out by the hash of the name: a document stays on its side when others come."""
    few = [Document(f"{i}", "x") for i in range(300)]
    more = sorted([*few, *(Document(f"new{i}", "x") for i in range(300))], key=lambda d: d.name)
    held_few, held_more = ({d.name for d in split(docs)[1]} for docs in (few, more))
    assert held_few == {name for name in held_more if not name.startswith("new")}
    assert 4 <= len(held_few) <= 24


def test_build_of_one_file(tmp_path):
    """A single document cannot be held out, so its end is: cut after a line end, nothing lost, nothing twice."""
    text = "".join(f"line {i}\n" for i in range(500))
    (tmp_path / "book.txt").write_text(text)
    made = build(tmp_path / "book.txt", tmp_path / "out")
    train, held_out = (made.tokenizer.decode(part.array).strip("\0") for part in (made.train, made.validation))
    assert train + held_out == text and held_out.startswith("line") and 0.03 < len(held_out) / len(text) < 0.06
    (tmp_path / "line.txt").write_text("no line end at all " * 20)
    assert len(build(tmp_path / "line.txt", tmp_path / "out2").validation) > 10


def test_byte_tokenizer():
    """Exact both ways; bytes that make no UTF-8 do not stop a sample from being shown."""
    coder = ByteTokenizer()
    assert coder.decode(coder.encode(TEXT)) == TEXT and coder.encode(TEXT).dtype == np.uint8
    assert coder.decode([72, 105, 255, 0]) == "Hi\ufffd\0"
    with pytest.raises(ValueError, match="NUL character at 1"):
        coder.encode("a\0b")


def test_bpe_corpus(folder, tmp_path):
    """Text comes back exactly, also text that names the separator; the same text gives the same files."""
    made = build(folder, tmp_path / "bpe", "bpe:400")
    header, coder = made.train.header, made.tokenizer
    assert coder.separator == 0 and header["tokenizer"] == coder.name and 257 < coder.vocab <= 400
    assert header["dtype"] == "uint16" and made.train.array.dtype == np.uint16
    byte = build(folder, tmp_path / "byte")
    assert len(made.train) < 0.5 * len(byte.train)
    assert coder.decode(made.train.array) == ByteTokenizer().decode(byte.train.array)
    for text in (TEXT, "<|document|> is text here", "é𝄞\r\n\x01"):
        ids = coder.encode(text)
        assert coder.decode(ids) == text and (ids != 0).all()
    build(folder, tmp_path / "again", "bpe:400")
    files = ("tokenizer.json", "train.bin", "validation.bin")
    assert all((tmp_path / "again" / f).read_bytes() == (tmp_path / "bpe" / f).read_bytes() for f in files)
    assert isinstance(corpus.open_folder(tmp_path / "bpe").tokenizer, BPETokenizer)


def test_bpe_learns_from_the_training_part_only(tmp_path):
    """A word that fills the held-out end becomes no token, though it is the most frequent pair of the whole text."""
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(500)) + "zqzq" * 40 + "\n")
    made = build(tmp_path / "book.txt", tmp_path / "out", "bpe:270")
    assert "zqzq" in made.tokenizer.decode(made.validation.array)
    assert len(made.tokenizer.encode("zq")) == 2 and len(made.tokenizer.encode("line")) < 3


def test_token_file(tmp_path):
    """separator, document, separator, document, separator; the narrowest dtype; header and bytes agree or are refused."""
    assert [dtype_for(v) for v in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.uint32]
    documents = [np.array([5, 70_000]), np.array([], int)]
    made = TokenFile.build(tmp_path / "t.bin", documents, vocab=70_001, separator=0, tokenizer="x")
    assert made.array.tolist() == [0, 5, 70_000, 0, 0] and made.array.dtype == np.uint32 and made.vocab == 70_001
    assert isinstance(made.array, np.memmap) and json.loads((tmp_path / "t.json").read_text())["tokenizer"] == "x"
    with pytest.raises(ValueError, match=r"ids must be in 0..9, found 10"):
        TokenFile.build(tmp_path / "u", [np.array([10])], vocab=10, separator=0)
    data = bytearray((tmp_path / "t.bin").read_bytes())
    data[5] ^= 1
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        TokenFile(tmp_path / "t").verify()
    (tmp_path / "t.bin").write_bytes(data[:-4])
    with pytest.raises(ValueError, match="16 bytes, the header says 5 tokens"):
        TokenFile(tmp_path / "t")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="not the header of a token file"):
        TokenFile(tmp_path / "t")
    with pytest.raises(ValueError, match=r"no such file.*minidist data build"):
        TokenFile(tmp_path / "absent")


def one_line(words: str):
    return pytest.raises(ValueError, match=rf"\A[^\n]*{words}[^\n]*\Z")


def test_bad_input(folder, tmp_path):
    """Each is one line that names the value and the remedy, and leaves nothing behind."""
    out = tmp_path / "out"
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.png").write_bytes(b"\xff\xfe")
    (tmp_path / "bare").mkdir()
    with one_line("absent.txt: no such file or folder"):
        build(tmp_path / "absent.txt", out)
    with one_line("empty.txt: there is no text in it"):
        build(tmp_path / "empty.txt", out)
    with one_line("bare: there is no text"):
        build(tmp_path / "bare", out)
    with one_line(r"binary: there is no text in it \(1 files are not UTF-8"):
        build(tmp_path / "binary", out)
    with one_line("latin.txt: byte 2 is not UTF-8; convert it"):
        build(folder / "latin.txt", out)
    with one_line("image.bin: has a NUL"):
        build(folder / "image.bin", out)
    with one_line("data.tokenizer='wordpiece': unknown; use 'byte', or 'bpe:N'"):
        build(folder, out, "wordpiece")
    with one_line("bpe:100: needs the 256 bytes"):
        build(folder, out, "bpe:100")
    with one_line("no such folder; build it with"):
        corpus.load(str(out))
    assert not out.exists() and not list(tmp_path.glob(".out*"))
    build(folder, out)
    with one_line("already exists; remove it"):
        build(folder, out)
    with one_line("cannot be written .*choose another --out"):
        build(folder, tmp_path / "empty.txt" / "out")
    (tmp_path / "notes.json").write_text("{}")
    with one_line("not a tokenizer file"):
        BPETokenizer(tmp_path / "notes.json")
    for name in ("bpe:", "bpe:x", "bytes", ""):
        with one_line("unknown"):
            parse(name)
