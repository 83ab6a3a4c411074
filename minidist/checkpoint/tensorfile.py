"""One safetensors file, written piece by piece: its bytes are hashed on their way, and nothing is held twice.

The format (huggingface/safetensors, README, "Format"): 8 bytes with the length of the header, little-endian; the header, JSON;
then the tensors' bytes. It is written here, since the library's own writer refuses parts of one buffer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist.core import disk

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(path: Path, tensors: dict[str, Tensor], block: int) -> dict[str, list[str]]:
    """Write CPU tensors under their names, and have them on the disk; the SHA-256 of each `block` bytes of every tensor.

    The widest elements come first, so that each tensor begins where its elements may be read in place.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    shapes = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    hashes: dict[str, list[str]] = {}
    with disk.open_for_write(path) as file:
        file.write(header(shapes))
        for name in order:
            hashes[name] = []
            for part in blocks(raw(tensors[name]), block):
                hashes[name].append(hashlib.sha256(part).hexdigest())
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return hashes


def header(shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What precedes the bytes of tensors (name, dtype, shape) that follow one another without a gap."""
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in shapes:
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row-major; its own memory where it lies that way."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def blocks(data: memoryview, size: int) -> Iterable[memoryview]:
    """`data` in parts of `size` bytes; one empty part where there is nothing."""
    return (data[at : at + size] for at in range(0, max(len(data), 1), size))
