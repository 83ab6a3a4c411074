"""A file of token ids: raw little-endian integers, memory-mapped, and beside it a JSON header that a person can read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

FORMAT_VERSION = 1


def dtype_for(vocab: int) -> np.dtype:
    """The narrowest unsigned integer that holds ids 0 .. vocab-1."""
    for dtype in (np.uint8, np.uint16):
        if vocab - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.uint32)


class TokenFile:
    """`path` without its suffix names the pair NAME.bin (tokens) and NAME.json (header).

    `array` (n,) is the memory map: nothing is read before it is used. `header` has format_version, tokenizer, vocab,
    separator, dtype, tokens, documents, sha256 (of NAME.bin) and source.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).with_suffix("")
        binary, header = self.path.with_suffix(".bin"), self.path.with_suffix(".json")
        for file in (header, binary):
            if not file.is_file():
                raise ValueError(f"{file}: no such file; build it with `minidist data build SRC --out {self.path.parent}`")
        try:
            self.header = json.loads(header.read_text(encoding="utf-8"))
            version, dtype, count = (self.header[key] for key in ("format_version", "dtype", "tokens"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{header}: not the header of a token file ({error!r}); build it again") from None
        if version != FORMAT_VERSION:
            raise ValueError(f"{header}: format_version={version}, this minidist reads {FORMAT_VERSION}; build it again")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        size = binary.stat().st_size
        if size != count * self.dtype.itemsize:
            raise ValueError(f"{binary}: {size} bytes, the header says {count} tokens of {dtype}; build it again")
        self.array = np.memmap(binary, self.dtype, mode="r") if count else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def vocab(self) -> int:
        """Ids are below this."""
        return self.header["vocab"]

    @property
    def separator(self) -> int | None:
        """The id that begins every document, and ends the one before."""
        return self.header["separator"]

    def verify(self) -> None:
        """Raise ValueError if the tokens are not those that were written."""
        binary = self.path.with_suffix(".bin")
        found = hashlib.sha256(binary.read_bytes()).hexdigest()
        if found != self.header["sha256"]:
            raise ValueError(f"{binary}: sha256 {found[:12]}... is not the header's; the file changed: build it again")

    @classmethod
    def build(cls, path: str | Path, documents: Iterable[np.ndarray], vocab: int, separator: int, **header) -> TokenFile:
        """Write documents (ids without separators) as: separator, document, separator, document, ..., separator.

        The last separator gives the last document its end as a target. `header`: more entries to record. Streams: the
        memory taken is that of one document. Raises ValueError on an id outside the vocabulary.
        """
        path, dtype = Path(path).with_suffix(""), dtype_for(vocab).newbyteorder("<")
        sha, tokens, count = hashlib.sha256(), 0, 0
        mark = np.array([separator], dtype)
        with open(path.with_suffix(".bin"), "wb") as out:

            def write(ids: np.ndarray) -> None:
                data = ids.astype(dtype).tobytes()
                out.write(data)
                sha.update(data)

            for document in documents:
                if len(document) and not 0 <= document.min() <= document.max() < vocab:
                    raise ValueError(f"document {count}: ids must be in 0..{vocab - 1}, found {document.max()}")
                write(mark)
                write(document)
                tokens, count = tokens + 1 + len(document), count + 1
            if count:
                write(mark)
                tokens += 1
        record = {"format_version": FORMAT_VERSION, "vocab": vocab, "separator": separator, "dtype": dtype_for(vocab).name}
        record |= {"tokens": tokens, "documents": count, "sha256": sha.hexdigest()} | header
        path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return cls(path)
