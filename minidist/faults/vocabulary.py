"""Faults as data: what shall go wrong, on which rank, when, and how much; read from text such as `kill:rank=1,step=7`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """One kind of fault, and the words that it takes beside rank, step and attempt."""

    meaning: str
    needs: tuple[str, ...] = ()
    """amounts that have to be stated"""
    takes: tuple[str, ...] = ()
    """amounts that may be"""


KINDS = {
    "kill": Kind("the rank's process ends by SIGKILL as the step begins"),
    "stop": Kind("the rank's process stands still as the step begins, for so many seconds or for ever", (), ("seconds",)),
    "slow": Kind("the rank sleeps so many seconds within every step from this one on", ("seconds",)),
    "slow-link": Kind(
        "what the rank sends takes latency seconds, and 1 / bandwidth seconds a byte", (), ("latency", "bandwidth")
    ),
    "slow-disk": Kind("the rank writes checkpoints at so many bytes a second", ("bytes_per_s",)),
    "full-disk": Kind("the rank's disk is full after so many bytes of checkpoints", ("bytes",)),
    "nan": Kind("one element of a gradient of the rank is NaN, or `value`, in the step", (), ("value",)),
    "flip": Kind("a bit of the rank's file in the newest checkpoint turns as the step begins"),
}
FROM_THE_START = ("slow", "slow-link", "slow-disk", "full-disk")  # kinds that last: without a step, from the first one on
NONNEGATIVE = ("seconds", "latency", "bytes")
POSITIVE = ("bandwidth", "bytes_per_s")


@dataclass(frozen=True)
class Fault:
    """One fault. `amounts` are in seconds, bytes and bytes a second; a `step` of 0 is the beginning of the run."""

    kind: str
    rank: int
    step: int
    attempt: int = 0
    """the start of the job in which it strikes, 0 for the first: a job that comes back would else die of it again and again"""
    amounts: dict[str, float] = field(default_factory=dict, hash=False)

    def __str__(self):
        words = {"rank": self.rank, "step": self.step, **({"attempt": self.attempt} if self.attempt else {}), **self.amounts}
        return f"{self.kind}:" + ",".join(f"{name}={value:g}" for name, value in words.items())


def read(text: str) -> Fault:
    """The fault that a text such as `stop:rank=2,step=3,seconds=5` means. ValueError, in one line, for what cannot be."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"fault {text!r}: there is no kind {kind!r}, {_nearest(kind, list(KINDS))}")
    takes, given = KINDS[kind], {}
    words = ["rank", "step", "attempt", *takes.needs, *takes.takes]
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in words:
            raise ValueError(f"fault {text!r}: {kind} takes no {name!r}, {_nearest(name, words)}")
        if not equals or name in given:
            raise ValueError(f"fault {text!r}: write {name}=NUMBER, once")
        given[name] = _number(text, name, value)
    needed = ["rank", *([] if kind in FROM_THE_START else ["step"]), *takes.needs]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"fault {text!r}: state {' and '.join(missing)} too, as in {kind}:{_example(needed)}")
    if kind == "slow-link" and not {"latency", "bandwidth"} & given.keys():
        raise ValueError(f"fault {text!r}: state latency in seconds, bandwidth in bytes a second, or both")
    place = {name: int(given.pop(name, 0)) for name in ("rank", "step", "attempt")}
    return Fault(kind, **place, amounts=given)


def read_all(texts: Sequence[str], ranks: int, steps: int) -> list[Fault]:
    """The faults that these texts mean, of a job of `ranks` ranks and `steps` steps. ValueError for one that cannot strike."""
    faults = [read(text) for text in texts]
    for text, fault in zip(texts, faults, strict=True):
        if fault.rank >= ranks:
            raise ValueError(f"fault {text!r}: there is no rank {fault.rank}, give 0 to {ranks - 1}")
        if fault.step > steps:
            raise ValueError(f"fault {text!r}: step {fault.step} is beyond the last one, {steps}")
    return faults


def help_text() -> str:
    """The kinds, what each does, and the words it takes: one line each."""
    lines = []
    for name, kind in KINDS.items():
        at = "[step=S]" if name in FROM_THE_START else "step=S"
        amounts = [*(f"{word}=X" for word in kind.needs), *(f"[{word}=X]" for word in kind.takes)]
        lines.append(f"{name}:{','.join(['rank=R', at, *amounts])}  {kind.meaning}")
    return "\n".join(lines)


def _number(text: str, name: str, value: str) -> float:
    whole = name in ("rank", "step", "attempt")
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        what = "a whole number" if whole else "a number such as 0.5 or 1e6"
        raise ValueError(f"fault {text!r}: {name}={value} is not {what}") from None
    if name == "value":
        if math.isfinite(number):
            raise ValueError(f"fault {text!r}: value={value} is finite, give nan, inf or -inf")
    elif not math.isfinite(number) or number < 0 or (name in POSITIVE and number == 0):
        raise ValueError(f"fault {text!r}: {name}={value} cannot be, give {'more than 0' if name in POSITIVE else '0 or more'}")
    return number


def _nearest(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else f"use one of {', '.join(words)}"


def _example(words: list[str]) -> str:
    numbers = {"rank": 1, "step": 7, "seconds": 0.5, "bytes_per_s": "1e6", "bytes": 100000}
    return ",".join(f"{word}={numbers[word]}" for word in words)
