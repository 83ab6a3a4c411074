"""Lesson 7's widget: bucket size, latency and bandwidth against what backward hides, on `plan.time` and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minidist.core.tape import Line, Tape
from minidist.plan.time import LinkModel, Overlap, bucket_timeline


def since(tape: Tape, first: int, began: float, backward: float) -> Tape:
    """The lines of a tape from place `first` on, behind a bar for backward; times count from `began`."""
    moved = Tape(tape.rank)
    moved.lines.append(Line("backward", "me", (tape.rank,), 0, 0, "", (), "control", 1, 0.0, backward - began))
    for line in tape.lines[first:]:
        fields = dict(vars(line), launch=line.launch - began, finish=line.finish and line.finish - began)
        moved.lines.append(Line(**fields))
    return moved


def plans(gradients: Sequence[tuple[float, int]], backward_s: float, n: int, values: dict) -> dict[str, Overlap]:
    """What the model says of a backward whose gradients were ready at these moments, for the values of the controls.

    `gradients` are (seconds from backward's start, bytes) in order of arrival; the link charges its latency once a bucket, as
    the delay line does.
    """
    link = LinkModel(values["latency_ms"] / 1e3, values["MB_per_s"] * 1e6)
    plan = partial(bucket_timeline, gradients, seconds=partial(link.delayed_all_reduce_s, n=n), backward_s=backward_s)
    size = round(values["bucket_kB"] * 1e3)
    return {
        "naive": plan(bucket_bytes=0, overlap=False),
        "bucketed": plan(bucket_bytes=size, overlap=False),
        "overlapped": plan(bucket_bytes=size),
    }


def figure(tapes: dict[str, Tape], title: str):
    """Backward and the reductions of several steps, a row each, with a read-out that says when each was over."""
    from minidist.core.timeline import timeline

    drawn = timeline(list(tapes.values()), title=title, labels=list(tapes), height=0.7)
    drawn.axes[0].set_xlabel("ms since backward began")
    words = [f"{title}, times in ms since backward began"]
    for name, (backward, *lines) in tapes.items():
        early = sum(line.launch < backward.finish for line in lines)
        end = max([backward.finish, *(line.finish for line in lines)])
        words.append(
            f"{name}: backward to {backward.finish * 1e3:.0f}; {len(lines)} reduction{'s' * (len(lines) != 1)}, the first from "
            f"{lines[0].launch * 1e3:.0f}, {early} begun within backward; over at {end * 1e3:.0f}"
        )
    drawn.alt = "\n".join(words)
    return drawn


def overlap(gradients: Sequence[tuple[float, int]], backward_s: float, n: int) -> Callable[[dict], tuple]:
    """The widget's function: values -> (figure, words). Controls: bucket_kB, latency_ms, MB_per_s."""

    def draw(values: dict) -> tuple:
        made = plans(gradients, backward_s, n, values)
        tapes = {name: plan.tape(n=n, on_wire=True) for name, plan in made.items()}
        drawn = figure(tapes, "What the link carries when, by model")
        for name, plan in made.items():
            drawn.alt += f"\n{name}: {plan.exposed_s * 1e3:.0f} ms exposed, {plan.hidden:.0%} of the sending hidden"
        return drawn, drawn.alt

    return draw
