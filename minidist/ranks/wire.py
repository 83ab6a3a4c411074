"""How values cross between the parent and its ranks: cloudpickle by value, tensors as their own bytes.

Both ends are our own processes on one host, joined by an authenticated socket; nothing from outside is ever unpickled.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
import sysconfig
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

_SCHEME = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
INSTALLED = tuple(path + os.sep for path in {*_SCHEME, *map(os.path.realpath, _SCHEME)})


class _Pickler(cloudpickle.Pickler):
    """Torch pickles the whole storage behind a view; a parameter in a flat buffer would carry its whole unit along."""

    def reducer_override(self, obj: Any):
        if isinstance(obj, CodeType):  # cloudpickle would drop the file name, and with it the lines of every traceback
            return marshal.loads, (marshal.dumps(obj),)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            flat = obj.detach().contiguous().reshape(-1).view(torch.uint8)
            state = dict(vars(obj)) or None
            keeps_grad = obj.requires_grad and obj.is_leaf
            args = (type(obj), flat.numpy().tobytes(), str(obj.dtype).removeprefix("torch."), tuple(obj.shape), keeps_grad)
            return _tensor, args, state, None, None, _restore
        return super().reducer_override(obj)


def _is_plain(x) -> bool:
    torch = sys.modules["torch"]
    return x.device.type == "cpu" and x.layout is torch.strided and not (x.is_quantized or x.is_conj() or x.is_neg())


def _tensor(kind: type, data: bytes, dtype: str, shape: tuple[int, ...], requires_grad: bool):
    import torch

    kind_of = getattr(torch, dtype)
    x = torch.frombuffer(bytearray(data), dtype=kind_of) if data else torch.empty(0, dtype=kind_of)
    x = x.reshape(shape)
    return kind(x, requires_grad=requires_grad) if kind is torch.nn.Parameter else x.requires_grad_(requires_grad)


def _restore(x, state: dict) -> None:
    vars(x).update(state)


def dumps(value: Any) -> bytes:
    """Pickle `value`. What belongs to an importable module travels by its name: right for results, whose reader has it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def dumps_by_value(value: Any) -> bytes:
    """Pickle with the code of all functions and classes of the user's own modules, so that ranks run the latest."""
    by_value = _users_modules()
    registered = cloudpickle.list_registry_pickle_by_value()
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(value)
    finally:
        for module in by_value:
            if module.__name__ not in registered:
                cloudpickle.unregister_pickle_by_value(module)


def loads(data: bytes) -> Any:
    """The value that was packed."""
    return cloudpickle.loads(data)


_installed: dict[str, ModuleType] = {}  # modules that need no second look: 1,300 of them would take 3 ms a run


def _users_modules() -> list[ModuleType]:
    """Modules that are neither ours, nor Python's, nor installed: a test, an exercise, a file beside the notebook."""
    found = []
    for name, module in list(sys.modules.items()):
        if _installed.get(name) is module:
            continue
        if _is_users(name, module):
            found.append(module)
        else:
            _installed[name] = module
    return found


def _is_users(name: str, module: ModuleType) -> bool:
    if not isinstance(module, ModuleType) or module.__name__ != name or name.split(".")[0] in ("__main__", "minidist"):
        return False  # cloudpickle takes __main__ by value of its own accord
    top = sys.modules.get(name.split(".")[0], module)  # parts of an extension module have no file of their own
    file = getattr(module, "__file__", None) or getattr(top, "__file__", None)
    if not isinstance(file, str):
        return not hasattr(module, "__path__") and name not in sys.stdlib_module_names
    return not file.startswith(INSTALLED) and not os.path.realpath(file).startswith(INSTALLED)
