"""Text to ids and back: bytes, or byte-pair encoding trained on the corpus. Id 0 separates documents in both."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

BPE_FILE = "tokenizer.json"
_MARK = "<|document|>"  # the name of id 0 inside a BPE file; never produced from text


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    name: str  # as in data.tokenizer: "byte" or "bpe:4096"
    vocab: int
    separator: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """The bytes of UTF-8, 256 ids. Id 0 is the separator: the NUL byte, which text does not contain."""

    name, vocab, separator = "byte", 256, 0

    def encode(self, text: str) -> np.ndarray:
        """uint8 (n,). Raises ValueError on a NUL character."""
        if "\0" in text:
            raise ValueError(f"the text has a NUL character at {text.index(chr(0))}, which separates documents; remove it")
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Separators become NUL characters; bytes that are not UTF-8 (a model may say any) become U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class BPETokenizer:
    """Byte-level byte-pair encoding by the `tokenizers` library; any text is encodable and comes back exactly."""

    separator = 0

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path}: not a tokenizer file ({error}); build the corpus again") from None
        self._library.encode_special_tokens = True  # the separator's name in a text is text, not a separator
        self.vocab = self._library.get_vocab_size()
        self.name = f"bpe:{self.vocab}"

    def encode(self, text: str) -> np.ndarray:
        """uint32 (n,)."""
        return np.array(self._library.encode(text).ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Separators become NUL characters, as with bytes."""
        documents, piece = [], []
        for i in [*(int(i) for i in ids), self.separator]:
            if i == self.separator:
                documents.append(self._library.decode(piece))
                piece = []
            else:
                piece.append(i)
        return "\0".join(documents)

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, path: str | Path) -> BPETokenizer:
        """Learn `vocab` ids (separator and the 256 bytes among them) from texts and save them at `path`.

        Deterministic: the same texts give the same file. A small corpus may give fewer ids than asked.
        """
        if vocab < 257:
            raise ValueError(f"data.tokenizer=bpe:{vocab}: needs the 256 bytes and the separator; use bpe:257 or more")
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[_MARK], initial_alphabet=alphabet, show_progress=False)
        library.train_from_iterator(texts, trainer)
        library.save(str(path))
        return cls(path)


def parse(name: str) -> int | None:
    """None for "byte", N for "bpe:N"; ValueError for anything else."""
    kind, _, size = name.partition(":")
    if name == "byte":
        return None
    if kind == "bpe" and size.isdecimal():
        return int(size)
    raise ValueError(f"data.tokenizer={name!r}: unknown; use 'byte', or 'bpe:N' for N ids, such as 'bpe:4096'")


def load(name: str, folder: str | Path) -> Tokenizer:
    """The tokenizer called `name` of the corpus in `folder`."""
    return ByteTokenizer() if parse(name) is None else BPETokenizer(Path(folder) / BPE_FILE)
