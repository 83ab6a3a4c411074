"""Traces: tapes as files in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A rank is a process; its steps, its work, and each group it talks in are threads of it. What is under way at once in a group
lies on threads of its own, so that no two events of one thread overlap. An arrow joins a send with its recv. Every event
carries the line or span it came from, so `from_chrome` gives the same tapes back. A rank writes its own file when its steps
are over; nothing is gathered. Times are those of one host's clock.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minidist.core import spans
from minidist.core.tape import Line, Span, Tape

FORMAT = "minidist trace 1"
PICTURES = (".png", ".svg", ".pdf")
Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """What `load` found."""

    tapes: list[Tape]
    """in order of ranks"""
    notes: list[str]
    """what a reader has to know: ranks that are missing, clocks that do not agree"""
    about: dict[str, Any]
    """how many `ranks` the run had, and on which `hosts`"""


def to_chrome(tapes: Sequence[Tape], *, origin: float | None = None, **about: Any) -> dict[str, Any]:
    """The tapes as one JSON object in the Chrome trace event format.

    Its times are microseconds since `origin`, in seconds of the tapes' clock; default: the first moment on any tape. Files of
    several ranks that are to be opened together need the same origin. `about` is kept in the file beside the host's name.
    """
    first, last = spans.extent(tapes)
    origin = first if origin is None else origin
    events: list[Event] = []
    ends: dict[tuple, list[Event]] = defaultdict(list)
    for tape in tapes:
        events += _rank(tape, origin, last, ends)
    events += [event for key, (sent, got) in enumerate(_pairs(ends), 1) for event in _arrow(key, sent, got)]
    other = {"format": FORMAT, "host": socket.gethostname(), "origin_s": origin, **about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def from_chrome(trace: dict[str, Any]) -> list[Tape]:
    """The tapes that `to_chrome` was given. ValueError where the object is none of its making."""
    about = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("no trace of minidist's: write one with `minidist train RECIPE --trace`")
    tapes = {event["pid"]: Tape(event["pid"]) for event in trace["traceEvents"] if event["ph"] == "M"}
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in sorted(bars, key=lambda event: event["args"]["number"]):
        tape, args = tapes[event["pid"]], event["args"]
        if event["cat"] == "operation":
            line = Line(**{field.name: args[field.name] for field in fields(Line)})
            line.ranks, line.shape = tuple(line.ranks), tuple(line.shape)
            tape.lines.append(line)
        else:
            tape.spans.append(Span(event["name"], args["start"], args["finish"]))
    return [tapes[rank] for rank in sorted(tapes)]


def write(path: Path | str, tapes: Sequence[Tape], *, origin: float | None = None, **about: Any) -> None:
    """Write the tapes into a file, whole or not at all. For `origin` and `about` see `to_chrome`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(to_chrome(tapes, origin=origin, **about)) + "\n", encoding="utf-8")
    os.replace(beside, path)


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank of a run in `folder` writes its trace."""
    return folder / "trace" / f"rank-{rank:04d}.json"


def write_rank(folder: Path, tape: Tape, ranks: int) -> None:
    """Write one rank's trace of a run in `folder` on `ranks` ranks. Its times count from the clock's own zero."""
    write(rank_file(folder, tape.rank), [tape], origin=0.0, ranks=ranks)


def load(path: Path | str) -> Trace:
    """The traces of a run: of its folder, of the folder trace/ in it, or of one file. ValueError where there is none."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such run folder, give one such as runs/tiny, trained with --trace")
    files = [path] if path.is_file() else sorted(path.glob("trace/rank-*.json")) or sorted(path.glob("rank-*.json"))
    if not files:
        raise ValueError(f"{path}: no trace in it, train with --trace to have one written")
    tapes: dict[int, Tape] = {}
    hosts, wanted = set(), 0
    for file in files:
        for tape, about in _read(file):
            if tape.rank in tapes:
                raise ValueError(f"{file}: rank {tape.rank} is in another file, too; remove one of them")
            tapes[tape.rank] = tape
            hosts.update(about.get("hosts") or [about["host"]])
            wanted = max(wanted, about.get("ranks", 0))
    notes = []
    if missing := sorted(set(range(wanted)) - set(tapes)):
        notes.append(f"no trace of rank {', '.join(map(str, missing))}: it ended before its traced steps did")
    if len(hosts) > 1:
        notes.append(f"ranks ran on {len(hosts)} hosts, whose clocks have different zeros: compare times of one host only")
    return Trace([tapes[rank] for rank in sorted(tapes)], notes, {"ranks": max(wanted, len(tapes)), "hosts": sorted(hosts)})


def join(trace: Trace, out: Path | str) -> None:
    """Write the traces of all ranks into one file, times from the first moment of all."""
    write(out, trace.tapes, **trace.about)


def report(run: str, *, out: str | None = None, step: int | None = None, plot: str | None = None) -> tuple[dict[str, Any], str]:
    """What `minidist trace` does: join a run's traces into `out`, sum them up, draw them into `plot`. (for JSON, in words)

    `out` is trace.json in the run's folder by default, and nothing is written where `run` is a file. `step` sums up and draws
    that step alone. ValueError for what cannot be read, or a kind of picture that there is not.
    """
    if plot and Path(plot).suffix not in PICTURES:
        raise ValueError(f"--plot {plot}: give a name that ends in {', '.join(PICTURES)}")
    found = load(run)
    tapes = found.tapes if step is None else spans.cut(found.tapes, step=step)
    if out is None and Path(run).is_dir():
        out = str(Path(run) / "trace.json")
    if out:
        join(found, out)
    if plot:
        from minidist.core.timeline import timeline

        timeline(tapes, title=f"{run}, step {step}" if step is not None else run).savefig(plot, dpi=144)
    rows = summary(tapes)
    words = [table(rows, tapes), *found.notes, *([f"{out}: open it in https://ui.perfetto.dev"] if out else [])]
    return {"out": out, "notes": found.notes, "ranks": rows}, "\n".join(words)


def summary(tapes: Sequence[Tape]) -> list[dict[str, Any]]:
    """A dictionary a rank, in seconds: time of its steps, busy and idle (None without work), and what it sent.

    `communicating_s` is the time with an operation under way, `hidden_s` the part of it that lies under work, `operations`
    has calls, seconds and booked bytes by operation and tag. Teaching checks are left out.
    """
    found = spans.shares(tapes)
    rows = []
    for place, tape in enumerate(tapes):
        work = [(span.start, span.finish) for span in spans.work(tape)]
        lines = [line for line in tape.lines if line.tag != "check"]
        talk = [(line.launch, line.finish) for line in lines if line.finish is not None]
        frames = spans.steps(tape)
        first, last = spans.extent([tape])
        busy = found.busy[place] if found else None
        rows.append(
            {
                "rank": tape.rank,
                "steps": sorted(frames),
                "seconds": sum(frame.finish - frame.start for frame in frames.values()) if frames else last - first,
                "busy_s": busy,
                "idle_s": found.total - busy if found else None,
                "communicating_s": spans.covered(talk),
                "hidden_s": spans.covered(work) + spans.covered(talk) - spans.covered([*work, *talk]) if found else None,
                "unfinished": sum(line.finish is None for line in lines),
                "operations": _operations(lines),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], tapes: Sequence[Tape]) -> str:
    """The summary for a person, with the bubble where ranks worked on a pipeline."""
    lines = []
    for row in rows:
        which = f"steps {', '.join(map(str, row['steps']))}" if row["steps"] else "no steps"
        head = f"rank {row['rank']}: {which}, {row['seconds'] * 1e3:.1f} ms"
        if row["busy_s"] is not None:
            head += f"; busy {row['busy_s'] * 1e3:.1f} ms, idle {row['idle_s'] * 1e3:.1f} ms"
        head += f"; communicating {row['communicating_s'] * 1e3:.1f} ms"
        if row["busy_s"] is not None:
            head += f", {row['hidden_s'] * 1e3:.1f} ms of it hidden by work"
        lines.append(head + (f"; {row['unfinished']} never finished" if row["unfinished"] else ""))
        for one in row["operations"]:
            words = f"{one['op']:<15}{one['tag']:<9}{one['calls']:>6} calls{one['seconds'] * 1e3:>11.1f} ms"
            lines.append(f"    {words}{one['sent']:>16,.0f} bytes sent")
    _, bubble = spans.in_words(tapes)
    return "\n".join([*lines, bubble] if bubble else lines)


def _operations(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Calls, seconds and bytes by operation and tag, most seconds first."""
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.op, line.tag].append(line)
    found = [
        {
            "op": op,
            "tag": tag,
            "calls": len(same),
            "seconds": sum(line.finish - line.launch for line in same if line.finish is not None),
            "sent": sum(line.sent for line in same),
        }
        for (op, tag), same in groups.items()
    ]
    return sorted(found, key=lambda one: -one["seconds"])


def _read(file: Path) -> list[tuple[Tape, dict[str, Any]]]:
    """The tapes in a file, each with what the file says about itself."""
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
        return [(tape, trace["otherData"]) for tape in from_chrome(trace)]
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: damaged, not valid JSON ({error}); remove it, or train again with --trace") from None
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: damaged, {error!r} where an event was expected; train again with --trace") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _rank(tape: Tape, origin: float, last: float, ends: dict[tuple, list[Event]]) -> list[Event]:
    """The events of one rank; its sends and receives are noted in `ends`, by what a pair of them has in common."""
    rank = tape.rank
    rows: dict[str, list[tuple[float, float, Event]]] = {"steps": [], "work": []}
    for number, span in enumerate(tape.spans):
        what = spans.part(span.name)
        step = spans.is_step(span)
        args = {"number": number, "start": span.start, "finish": span.finish}
        args |= {} if what.micro is None else {"micro": what.micro, "chunk": what.chunk}
        event = {"name": span.name, "cat": "step" if step else spans.LOOKS.get(what.kind, spans.OTHER)[0], "args": args}
        rows["steps" if step else "work"].append((span.start, span.finish, event))
    for number, line in enumerate(tape.lines):
        finish = last if line.finish is None else line.finish
        name = line.op if line.finish is not None else f"{line.op}, never finished"
        event = {"name": name, "cat": "operation", "args": {"number": number, **asdict(line)}}
        rows.setdefault(f"in {line.group}", []).append((line.launch, finish, event))
        if line.op in ("send", "recv"):
            pair = (rank, line.peer) if line.op == "send" else (line.peer, rank)
            ends[line.group, line.ranks, *pair, line.seq].append(event)
    events = [_meta("process_name", rank, name=f"rank {rank}"), _meta("process_sort_index", rank, sort_index=rank)]
    tid = 0
    for name, bars in rows.items():
        for number, lane in enumerate(_lanes(bars)):
            events.append(_meta("thread_name", rank, tid, name=name if not number else f"{name} ({number + 1})"))
            events.append(_meta("thread_sort_index", rank, tid, sort_index=tid))
            for start, finish, event in lane:
                ts, end = _us(start - origin), _us(max(start, finish) - origin)
                event |= {"ph": "X", "pid": rank, "tid": tid, "ts": ts, "dur": round(end - ts, 3)}
                events.append(event)
            tid += 1
    return events


def _lanes(bars: list[tuple[float, float, Event]]) -> list[list[tuple[float, float, Event]]]:
    """Bars dealt out so that no two of a lane overlap: each to the first lane that is free at its start."""
    lanes: list[list[tuple[float, float, Event]]] = []
    for bar in sorted(bars, key=lambda bar: bar[:2]):
        lane = next((lane for lane in lanes if lane[-1][1] <= bar[0]), None)
        if lane is None:
            lanes.append([bar])
        else:
            lane.append(bar)
    return lanes


def _pairs(ends: dict[tuple, list[Event]]) -> Iterable[tuple[Event, Event]]:
    """Each send with its recv, where both are there."""
    for found in ends.values():
        sends, gets = ([event for event in found if event["args"]["op"] == op] for op in ("send", "recv"))
        yield from zip(sends, gets, strict=False)


def _arrow(number: int, sent: Event, got: Event) -> tuple[Event, Event]:
    """A flow from within the send to within the recv, upright where the recv was already waiting."""
    there = min(max(sent["ts"], got["ts"]), round(got["ts"] + got["dur"], 3))
    head = {"name": "message", "cat": "message", "id": number}
    return (
        {**head, "ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]},
        {**head, "ph": "f", "bp": "e", "pid": got["pid"], "tid": got["tid"], "ts": there},
    )


def _meta(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
