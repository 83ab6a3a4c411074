"""The guard of graded ranks: what a task refuses is refused at run time too, and so is talking around the tape.

It tells the learner's code from the engine's by the nearest frame on the stack that belongs to a file of torch, of minidist or
of another installed package. It stops honest slips and the plain ways of cheating. It does not stop code that rewrites this
process from inside (frames, closures, memory), nor native libraries that write files themselves. For exams use a container.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import minidist

BUILD = "this is the thing to build"
SIDEWAYS = "ranks talk through minidist.core.comm, where the tape hears them"
ALWAYS = {
    "torch.nn.parallel": BUILD,
    "torch.distributed.fsdp": BUILD,
    "torch.distributed._composable": BUILD,
    "torch.distributed.tensor": BUILD,
    "torch.distributed._tensor": BUILD,
    "torch.distributed.pipelining": BUILD,
    "torch.distributed.optim": BUILD,
    "torch.distributed.rpc": SIDEWAYS,
    "torch.distributed.FileStore": SIDEWAYS,
    "torch.distributed.TCPStore": SIDEWAYS,
    "torch.save": SIDEWAYS,
    "torch.from_file": SIDEWAYS,
    "torch.load": SIDEWAYS,
    "torch.multiprocessing": SIDEWAYS,
    "torch.ops._c10d_functional": SIDEWAYS,
    "multiprocessing": SIDEWAYS,
    "_multiprocessing": SIDEWAYS,
    "_posixshmem": SIDEWAYS,
    "safetensors": SIDEWAYS,
    "minidist.course.tasks": "an answer is not to be found in its grader",
    "minidist.course.grading": "an answer is not to be found in its grader",
    "minidist.course.recorder": "the recorder is not part of an answer",
    "minidist.course.guard": "the guard is not part of an answer",
    "minidist.course.graded": "the sandbox is not part of an answer",
}
FREE = ("minidist.course", "minidist.ranks")  # which any notebook imports at its head
CHANNELS = (
    "socket.__new__ socket.connect socket.bind socket.sendto socket.sendmsg subprocess.Popen os.system os.exec os.posix_spawn "
    "os.spawn os.fork os.forkpty os.kill os.killpg signal.pthread_kill mmap.__new__ ctypes.dlopen ctypes.dlsym "
    "ctypes.call_function os.rename os.remove os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.setxattr "
    "gc.get_objects gc.get_referrers"
)
FORBIDDEN = {event: event.removesuffix(".__new__") for event in CHANNELS.split()}
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
OURS = str(Path(minidist.__file__).parent) + os.sep
ROOT = os.path.dirname(os.path.dirname(OURS)) + os.sep
ANSWERS = (ROOT + "solutions" + os.sep, ROOT + "tests" + os.sep, OURS + os.path.join("course", "data", "solutions"))
TASKS = OURS + os.path.join("course", "tasks") + os.sep
CREATES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class Refused(RuntimeError):
    """A submission reached for something that its task does not allow."""


class ClosedFile(Refused, PermissionError):
    """The same for a file: libraries know how to live with one that they may not write."""


def install(refused: dict[str, str], allowed: tuple[str, ...]) -> None:
    """Guard this process, for good: nothing takes an audit hook away again."""
    sys.dont_write_bytecode = True
    names = {**ALWAYS, **refused}
    if allowed:
        parts = {name for name in sys.modules if name.startswith("minidist.") and not _permitted(name, allowed)}
        names.update({name: f"the task allows {', '.join(allowed)}" for name in parts if name not in names})
    _guard_imports(names, allowed)
    for name, reason in names.items():
        _guard_name(name, reason)
    _guard_methods()
    sys.addaudithook(_audit)


def refuse(name: str, reason: str) -> Refused:
    """The exception that says so."""
    return Refused(f"{name} is not allowed here: {reason}")


def _permitted(name: str, allowed: tuple[str, ...]) -> bool:
    places = (*allowed, *FREE)
    return any(name == place or name.startswith(place + ".") or place.startswith(name + ".") for place in places)


def by_submission(anywhere: bool = False) -> bool:
    """Whether it is the learner's code that asks: the nearest frame outside Python's own library, or (`anywhere`) any frame.

    A thread that has no frame of ours was started by the learner.
    """
    frame, ours = sys._getframe(1), False
    while frame is not None:
        name = frame.f_code.co_filename
        trusted = name.startswith((OURS, *INSTALLED))
        ours = ours or (trusted and name != __file__)
        library = name == __file__ or name.startswith("<frozen") or (not trusted and name.startswith(STANDARD))
        if not library and not trusted:
            return True
        if not library and not anywhere:
            return False
        frame = frame.f_back
    return not ours and threading.current_thread() is not threading.main_thread()


def _guard_imports(names: dict[str, str], allowed: tuple[str, ...]) -> None:
    """`import x` and importlib.import_module("x"), for modules that are loaded and for those that are not."""

    def check(wanted: list[str]) -> None:
        for full in wanted:
            for name, reason in names.items():
                if full == name or full.startswith(name + "."):
                    if by_submission():
                        raise refuse(name, reason)
                    return
        if allowed and wanted[0].startswith("minidist.") and not _permitted(wanted[-1], allowed) and by_submission():
            raise refuse(wanted[0], f"the task allows {', '.join(allowed)}")

    plain, by_name = builtins.__import__, importlib.import_module

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0:
            check([name, *(f"{name}.{item}" for item in fromlist or ())])
        return plain(name, globals, locals, fromlist, level)

    def import_module(name, package=None):
        check([name])
        return by_name(name, package)

    builtins.__import__, importlib.import_module = guarded, import_module


def _guard_name(name: str, reason: str) -> None:
    """Attribute access: a loaded module gets a stand-in, a function or a class's constructor a check before it."""

    def check() -> None:
        if by_submission():
            raise refuse(name, reason)

    if name in sys.modules:
        for loaded in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
            _stand_in(loaded, check)
        return
    home, _, attribute = name.rpartition(".")
    module = sys.modules.get(home)
    thing = getattr(module, attribute, None) if module else None
    if isinstance(thing, type):
        _guard_class(thing, check)
    elif callable(thing):

        def guarded(*args, **kwargs):
            check()
            return thing(*args, **kwargs)

        setattr(module, attribute, guarded)


def _guard_methods() -> None:
    """What ranks share besides their groups: the store that introduced them, and storages that map a file."""
    import torch

    store, storages = torch._C._distributed_c10d.Store, (torch.UntypedStorage, torch.storage.TypedStorage, torch.Tensor)
    wanted = [
        (store, name) for name in ("set", "get", "add", "append", "wait", "check", "compare_set", "multi_get", "multi_set")
    ]
    wanted += [(kind, name) for kind in storages for name in ("from_file", "share_memory_", "_new_shared")]
    for kind, name in wanted:
        plain = getattr(kind, name, None)
        if plain is not None:
            setattr(kind, name, _checked(plain, f"{kind.__name__}.{name}"))


def _checked(plain: Callable, name: str) -> Callable:
    def checked(*args, **kwargs):
        if by_submission():
            raise refuse(name, SIDEWAYS)
        return plain(*args, **kwargs)

    return staticmethod(checked) if inspect.ismethod(plain) or inspect.isbuiltin(plain) else checked


def _guard_class(kind: type, check: Callable[[], None]) -> None:
    constructor = kind.__init__

    def __init__(self, *args, **kwargs):
        check()
        constructor(self, *args, **kwargs)

    kind.__init__ = __init__


class StandIn(ModuleType):
    """A module as everybody but the submission sees it."""

    def __init__(self, real: ModuleType, check: Callable[[], None]):
        super().__init__(real.__name__, real.__doc__)
        own = ("__spec__", "__path__", "__file__", "__loader__", "__package__")
        self.__dict__.update({name: vars(real)[name] for name in own if name in vars(real)})
        self.__dict__["_look"] = lambda name: (check(), getattr(real, name))[1]

    def __getattr__(self, name: str):
        return self.__dict__["_look"](name)


def _stand_in(name: str, check: Callable[[], None]) -> None:
    real = sys.modules[name]
    if not isinstance(real, ModuleType) or isinstance(real, StandIn):
        return
    stand_in = sys.modules[name] = StandIn(real, check)
    home, _, attribute = name.rpartition(".")
    if home in sys.modules and getattr(sys.modules[home], attribute, None) is real:
        setattr(sys.modules[home], attribute, stand_in)


def _audit(event: str, args: tuple) -> None:
    if event == "open":
        _file(*args)
    elif event in FORBIDDEN and not (event == "os.kill" and args[0] == os.getpid()) and by_submission():
        raise refuse(FORBIDDEN[event], SIDEWAYS)


def _file(path: object, mode: object, flags: object) -> None:
    """Answers and graders are closed books; and a submission writes no file, since another rank could read it."""
    if not isinstance(path, str | bytes | os.PathLike):
        return
    name = os.path.abspath(os.fsdecode(path))
    if name.startswith(ANSWERS) or (name.startswith(TASKS) and not os.path.basename(name).startswith(("drive_", "__init__"))):
        raise ClosedFile(f"{os.path.basename(name)} is not allowed here: an answer is not to be found in its grader")
    writes = isinstance(flags, int) and flags & CREATES and name != os.devnull and by_submission(anywhere=True)
    if writes or (name.startswith("/proc/") and by_submission()):
        raise ClosedFile(f"opening {path!r} is not allowed here: {SIDEWAYS}")
