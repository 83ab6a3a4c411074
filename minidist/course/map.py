"""The course map: lessons 0 to 20, what each stands on, which are the essentials, and how far the learner has come."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.course import progress, tasks


@dataclass(frozen=True)
class Lesson:
    """One lesson. `needs` are its hard prerequisites; every other link is only helpful."""

    number: int
    title: str
    essential: bool
    needs: tuple[int, ...] = ()
    ready: bool = False
    """whether its notebook exists in this version"""


LESSONS = (
    Lesson(0, "A cluster in your notebook", True, ready=True),
    Lesson(1, "What a GPU is", True, (0,)),
    Lesson(2, "Where memory and arithmetic go", True, (1,)),
    Lesson(3, "Number formats", True, (2,)),
    Lesson(4, "Memory for time on one device", True, (2,)),
    Lesson(5, "Collectives, and how they go wrong", True, (0,)),
    Lesson(6, "Ring all-reduce, the cost model", True, (5,)),
    Lesson(7, "Data parallel, for real", True, (6,)),
    Lesson(8, "Large batches", False, (2, 7)),
    Lesson(9, "Relaxing synchrony", False, (7,)),
    Lesson(10, "Compressing gradients", False, (7,)),
    Lesson(11, "ZeRO 1/2/3 (FSDP)", True, (3, 7)),
    Lesson(12, "Tensor + sequence parallel", True, (6,)),
    Lesson(13, "Context parallel", False, (12,)),
    Lesson(14, "Pipelines", True, (4, 5)),
    Lesson(15, "Experts", False, (5, 7)),
    Lesson(16, "Data, stopping and starting", True, (11,)),
    Lesson(17, "Launchers, topology, meshes", True, (11, 12, 14)),
    Lesson(18, "Faults and elasticity", False, (16,)),
    Lesson(19, "Seeing and measuring", True, (1, 7)),
    Lesson(20, "Capstone: 13B on 64 GPUs", True, (4, 11, 12, 14, 16, 17, 19)),
)

LOOKS = {"done": ("#009E73", ""), "started": ("#E69F00", "//"), "open": ("#FFFFFF", "")}
MARKS = {"done": "●", "started": "◐", "open": "○"}


def states() -> dict[int, str]:
    """Lesson number -> "open", "started" or "done", from the learner's journal."""
    known = tasks.by_lesson()
    events, damaged = progress.history()
    if damaged:
        print(f"({damaged} damaged line{'s' * (damaged > 1)} of {progress.NAME} skipped)")
    every = {f"{lesson.number:02}": known.get(f"{lesson.number:02}", []) for lesson in LESSONS}
    return {int(key): state for key, state in progress.fold(events, every).items()}


def words(states: dict[int, str]) -> str:
    """The map as text: a line a lesson. `*` marks the essentials."""
    done = sum(state == "done" for state in states.values())
    here = ", ".join(str(lesson.number) for lesson in LESSONS if lesson.ready)
    lines = [
        f"Course map: {done} of {len(LESSONS)} lessons done; in this version: lesson {here}.",
        "● done  ◐ started  ○ open  * essential",
    ]
    for lesson in LESSONS:
        needs = f"needs {', '.join(map(str, lesson.needs))}" if lesson.needs else "start here"
        star = "*" if lesson.essential else " "
        lines.append(f"{MARKS[states[lesson.number]]} {lesson.number:2}{star} {lesson.title:<35} ({needs})")
    return "\n".join(lines)


def course_map():
    """The map as a figure, with the same in words under it. Show it as a cell's last expression."""
    from minidist.core.timeline import AltFigure

    now = states()
    places = _places()
    columns, rows = (max(place[i] for place in places.values()) + 1 for i in (0, 1))
    figure = AltFigure(figsize=(1.75 * columns + 0.2, 0.95 * rows + 0.5), facecolor="white")
    axes = figure.add_axes((0.005, 0.01, 0.99, 0.98))
    axes.set_axis_off()
    axes.set_xlim(-0.52, columns - 0.48)
    axes.set_ylim(rows - 0.35, -0.75)
    for lesson in LESSONS:
        for need in lesson.needs:
            _arrow(axes, places[need], places[lesson.number], lesson.essential)
    for lesson in LESSONS:
        _box(axes, places[lesson.number], lesson, now[lesson.number])
    axes.text(-0.5, -0.68, "thick frame: essential    green: done    orange, hatched: started    white: open", fontsize=9)
    figure.alt = words(now)
    return figure


def _places() -> dict[int, tuple[int, int]]:
    """Column: the longest way from lesson 0. Row: the next free one, essentials first."""
    depth: dict[int, int] = {}
    for lesson in LESSONS:
        depth[lesson.number] = max((depth[need] + 1 for need in lesson.needs), default=0)
    places, filled = {}, {}
    for lesson in sorted(LESSONS, key=lambda lesson: (not lesson.essential, lesson.number)):
        column = depth[lesson.number]
        row = filled[column] = filled.get(column, -1) + 1
        places[lesson.number] = (column, row)
    return places


def _arrow(axes, tail: tuple[int, int], head: tuple[int, int], essential: bool) -> None:
    look = {"arrowstyle": "-|>", "color": "#444444" if essential else "#999999", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    start, stop = (tail[0] + 0.43, tail[1]), (head[0] - 0.43, head[1])
    axes.annotate("", stop, start, arrowprops={**look, "connectionstyle": "arc3,rad=0.06"}, zorder=1)


def _box(axes, place: tuple[int, int], lesson: Lesson, state: str) -> None:
    import textwrap

    from matplotlib.patches import FancyBboxPatch

    colour, hatch = LOOKS[state]
    x, y = place
    box = FancyBboxPatch(
        (x - 0.41, y - 0.27),
        0.82,
        0.54,
        boxstyle="round,pad=0.02,rounding_size=0.06",
        facecolor=colour,
        edgecolor="black",
        hatch=hatch,
        linewidth=2.2 if lesson.essential else 0.8,
        zorder=2,
    )
    axes.add_patch(box)
    text = "\n".join([str(lesson.number), *textwrap.wrap(lesson.title, 18)])
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1} if hatch else None
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, zorder=3, color="black", bbox=paper)
