"""How values cross between a graded rank and the judge: JSON, and the raw bytes of tensors; never a pickle of anything.

Exact types only. An object of any other class (one that equals everything, say) crosses as the name of its class.
"""

from __future__ import annotations

import base64
import io
import pickle
from math import prod
from multiprocessing.connection import Connection
from typing import Any

LARGEST = 2**28  # bytes of a message: noise on the line reads as a length of gigabytes
SCALARS = (bool, int, float, str)


def encode(value: object) -> Any:
    """A value as JSON. Plain scalars and lists stand for themselves; all else becomes a dict that names its kind."""
    import torch

    if value is None or type(value) in SCALARS:
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return pack(value)
    return {"object": type(value).__name__}


def pack(x) -> dict:
    """A tensor: its bytes in base64, dtype and shape."""
    import torch

    flat = x.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"raw": base64.b64encode(data).decode(), "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(x.shape)}


def unpack(raw: dict):
    """The tensor that `pack` packed. ValueError for what cannot be one."""
    import torch

    dtype, shape = getattr(torch, raw["dtype"], None), raw["shape"]
    data = bytearray(base64.b64decode(raw["raw"], validate=True))
    if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no tensor: dtype {raw['dtype']!r}, shape {shape!r}")
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"no tensor: {len(data)} bytes for {shape} of {raw['dtype']}")
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def readable(value: object) -> Any:
    """What `encode` made, for a judge: tensors as {"tensor": nested lists, "dtype": ..., "shape": ...}."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "raw" in value:
        return {"tensor": unpack(value).tolist(), "dtype": value["dtype"], "shape": value["shape"]}
    return {key: readable(item) for key, item in value.items()}


def pack_input(value: object) -> Any:
    """A case's input as JSON."""
    import torch

    if isinstance(value, torch.Tensor):
        return pack(value)
    if isinstance(value, dict):
        return {key: pack_input(item) for key, item in value.items()}
    return [pack_input(item) for item in value] if isinstance(value, list | tuple) else value


def decode(value: object) -> object:
    """An input as the submission gets it, tensors inside lists and dicts too."""
    import torch

    if isinstance(value, dict) and {"tensor", "dtype"} <= set(value):
        made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return made.view(value.get("shape", made.shape))
    if isinstance(value, dict) and set(value) == {"raw", "dtype", "shape"}:
        return unpack(value)
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


class _DataOnly(pickle.Unpickler):
    """Numbers, text and containers. Whatever asks for a class or a function is refused, so nothing can be called."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def plain(data: bytes) -> Any:
    """Plain data that one of our own channels framed. EOFError for anything else, as if the sender were gone."""
    try:
        return _DataOnly(io.BytesIO(data)).load()
    except Exception as error:
        raise EOFError(f"what a rank sent is not plain data: {error}") from None


class PlainConnection(Connection):
    """A connection to a process that is not trusted: it can send data, and nothing that would run here."""

    def recv(self) -> Any:
        """The next message, plain data only."""
        return plain(self.recv_bytes(LARGEST))
