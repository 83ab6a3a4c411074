"""Predict, then claim: the learner commits to a guess before the run; the lesson's numbers are asserted after it."""

from __future__ import annotations

import math
import numbers
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import EllipsisType

from minidist.course import progress, session

MOST_DELAY_S = 1.0  # a machine so noisy that a longer delay would be needed cannot tell anything by the clock
MOST_LISTED = 48  # characters of choices that fit into a line beside the rest
KEY = re.compile(r"\d\d[ab]?\.[a-z][a-z0-9_-]*")


class ClaimError(AssertionError):
    """A number in the lesson's prose is not what this run produced."""


def predict(
    key: str,
    guess: object = ...,
    *,
    choices: Sequence | None = None,
    order: Sequence | None = None,
    unit: str = "",
) -> None:
    """Note a guess. The learner replaces the `...`; an open guess, or one that cannot be read, never raises.

    `choices` lists the possible answers, `order` the things to put in order (the guess is a list of them); with neither
    the guess is a number. The first guess before the claim of the same key counts; later ones are marked as such.
    """
    _known(key)
    if session.grading():
        return
    session.current.asked.add(key)
    if isinstance(guess, EllipsisType):
        number = f"a number of {unit}" if unit else "a number"
        ask = f"one of {_listed(choices)}" if choices else f"an order of {_listed(order)}" if order else number
        print(f"{key}: no guess yet. Replace the ... by {ask}.")
        return
    problem = _unreadable(guess, choices, order)
    if problem:
        print(f"{key}: {problem}")
        return
    guess = list(guess) if order else guess
    early = key not in session.current.guesses and key not in session.current.revealed
    if early:
        session.current.guesses[key] = guess
    when = "Noted" if early else "Noted as a later guess; the first one counts"
    if key in session.current.revealed and key not in session.current.guesses:
        when = "Noted, though you have seen the answer"
    print(f"{key}: {when}: {_shown(guess, unit)}.")
    progress.record("predict", key, guess=guess, counts=early)


def claim(key: str, measured: object, expected: object, *, rel: float = 0.0, abs: float = 0.0, unit: str = "") -> None:
    """Assert a number of the prose, and reveal the guess of the same key.

    Numbers agree within `rel` of the expected one or within `abs`; lists item by item; all else exactly. In tests a miss
    raises `ClaimError`; a learner is told, and the run goes on.
    """
    _known(key)
    if session.grading():
        return
    holds = agrees(measured, expected, rel, abs)
    session.current.revealed.add(key)
    got, said = _shown(measured, unit), _shown(expected, unit)
    text = f"measured {got}, as the text says" if holds and got == said else f"measured {got}, the text says {said}"
    mark = "✓" if holds else "✗"
    print(f"{mark} {key}: {text}{_verdict(key, measured, rel, unit)}")
    progress.record("claim", key, holds=holds)
    if not holds:
        session.failed(f"claim {key} does not hold: {text}")
        if session.strict():
            raise ClaimError(f"{key}: {text}")
        print("  The text is wrong on this machine: please report it, with this line.")


def timed(
    key: str,
    slow: Callable[..., float | None],
    fast: Callable[..., float | None],
    *,
    at_least: float,
    delay_s: float | None = None,
    noise: Callable[..., float | None] | None = None,
    pairs: int = 3,
    attempts: int = 3,
) -> float:
    """Claim that `slow` takes at least `at_least` times as long as `fast`; returns the ratio that was measured last.

    Both are called in turns, `pairs` times each, and the medians compared. A callable that returns a float has held the
    stopwatch itself (seconds); else the wall clock does. The noise is measured first: how much two runs of `noise` (default:
    `fast`) differ. With `delay_s` both take one argument, the delay in seconds that they inject: `delay_s`, or ten times the
    noise where that is more. A miss is tried again, up to `attempts` in all; every attempt is printed. For a learner a miss is
    amber, since a busy machine proves nothing; in tests it raises `ClaimError`.
    """
    _known(key)
    if session.grading():
        return 0.0
    ratio, holds = 0.0, False
    for attempt in range(1, attempts + 1):
        jitter = _noise(noise or fast, () if delay_s is None else (delay_s,))
        inject = () if delay_s is None else (max(delay_s, 10 * jitter),)
        trusted = not inject or inject[0] <= MOST_DELAY_S
        if not trusted:
            print(f"  attempt {attempt}: noise {jitter * 1e3:.2g} ms; a delay of ten times that would take all day")
            continue
        times = [(_stopwatch(slow, inject), _stopwatch(fast, inject)) for _ in range(pairs)]
        longer, shorter = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = longer / max(shorter, 1e-9)
        injected = f", delay {inject[0] * 1e3:.3g} ms" if inject else ""
        print(
            f"  attempt {attempt}: {longer * 1e3:.3g} ms against {shorter * 1e3:.3g} ms, {ratio:.3g} times as long"
            f" (noise {jitter * 1e3:.2g} ms{injected})"
        )
        holds = ratio >= at_least
        if holds:
            break
    session.current.revealed.add(key)
    text = f"measured {ratio:.3g} times as long, the text says at least {at_least:g} times"
    print(f"{'✓' if holds else '~'} {key}: {text}{_verdict(key, ratio, 0.25, 'times')}")
    progress.record("claim", key, holds=holds, amber=not holds)
    if not holds and session.strict():
        raise ClaimError(f"{key}: {text}, in {attempts} attempts")
    if not holds:
        print("  Your machine was busy: a clock cannot tell it today. Run the cell again when it is quiet.")
    return ratio


claim.timed = timed


def _stopwatch(fn: Callable[..., float | None], arguments: tuple) -> float:
    """Seconds of one call: what it says itself, else the wall clock's."""
    began = time.perf_counter()
    said = fn(*arguments)
    took = time.perf_counter() - began
    return float(said) if isinstance(said, numbers.Real) and not isinstance(said, bool) else took


def _noise(fn: Callable[..., float | None], arguments: tuple) -> float:
    """How far apart neighbouring runs of the same thing lie, in seconds: the median of three pairs, after one to warm up."""
    _stopwatch(fn, arguments)
    times = [_stopwatch(fn, arguments) for _ in range(4)]
    return statistics.median(abs(a - b) for a, b in pairwise(times))


def agrees(measured: object, expected: object, rel: float = 0.0, abs: float = 0.0) -> bool:
    """Whether two values are the same within tolerance; True and 1 are not."""
    if isinstance(measured, bool) or isinstance(expected, bool):
        return measured is expected
    if isinstance(measured, numbers.Real) and isinstance(expected, numbers.Real):
        return measured == expected or math.isclose(measured, expected, rel_tol=rel, abs_tol=abs)
    if isinstance(measured, list | tuple) and isinstance(expected, list | tuple):
        return len(measured) == len(expected) and all(agrees(m, e, rel, abs) for m, e in zip(measured, expected, strict=True))
    return type(measured) is type(expected) and bool(measured == expected)


def _verdict(key: str, measured: object, rel: float, unit: str) -> str:
    if key not in session.current.guesses:
        return ". No guess yet." if key in session.current.asked else "."
    guess = session.current.guesses[key]
    right = agrees(guess, measured, max(rel, 0.0))
    return f". Your guess was {_shown(guess, unit)}: {'right' if right else 'not this time'}."


def _unreadable(guess: object, choices: Sequence | None, order: Sequence | None) -> str | None:
    if choices:
        return None if guess in list(choices) else f"{guess!r} is not among the choices: use one of {list(choices)}."
    if order:
        same = isinstance(guess, list | tuple) and sorted(map(repr, guess)) == sorted(map(repr, order))
        return None if same else f"{guess!r} is not an order of {list(order)}: use each of them once, in a list."
    number = isinstance(guess, numbers.Real) and not isinstance(guess, bool) and math.isfinite(guess)
    return None if number else f"{guess!r} is not a number: write one without its unit."


def _listed(options: Sequence) -> str:
    """The options, or where they are to be read: a line of output that is too long breaks in the middle of a word."""
    return str(list(options)) if len(str(list(options))) <= MOST_LISTED else "the things listed in the cell"


def _known(key: str) -> None:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key: write the lesson's number, a dot and a word, as in '07.bytes'")


def _shown(value: object, unit: str = "") -> str:
    if isinstance(value, list | tuple):
        value = f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1000:
        value = f"{value:,}"
    return f"{value} {unit}".strip()
