"""The course map: lessons 0 to 20, what each stands on, which are the essentials, and how far the learner has come."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.course import notebook, progress, tasks


@dataclass(frozen=True)
class Lesson:
    """One lesson. `needs` are its hard prerequisites; every other link is only helpful. `place` is (column, row) on the map."""

    number: int
    title: str
    essential: bool
    needs: tuple[int, ...]
    place: tuple[int, int]


LESSONS = (
    Lesson(0, "A cluster in your notebook", True, (), (0, 2)),
    Lesson(1, "What a GPU is", True, (0,), (1, 1)),
    Lesson(2, "Where memory and arithmetic go", True, (1,), (2, 1)),
    Lesson(3, "Number formats", True, (2,), (3, 0)),
    Lesson(4, "Memory for time on one device", True, (2,), (3, 1)),
    Lesson(5, "Collectives, and how they go wrong", True, (0,), (1, 3)),
    Lesson(6, "Ring all-reduce, the cost model", True, (5,), (2, 3)),
    Lesson(7, "Data parallel, for real", True, (6,), (3, 3)),
    Lesson(8, "Large batches", False, (2, 7), (3, 2)),
    Lesson(9, "Relaxing synchrony", False, (7,), (5, 3)),
    Lesson(10, "Compressing gradients", False, (7,), (5, 4)),
    Lesson(11, "ZeRO 1/2/3 (FSDP)", True, (3, 7), (4, 0)),
    Lesson(12, "Tensor + sequence parallel", True, (6,), (3, 5)),
    Lesson(13, "Context parallel", False, (12,), (4, 5)),
    Lesson(14, "Pipelines", True, (4, 5), (4, 1)),
    Lesson(15, "Experts", False, (5, 7), (3, 4)),
    Lesson(16, "Data, stopping and starting", True, (11,), (5, 0)),
    Lesson(17, "Launchers, topology, meshes", True, (11, 12, 14), (5, 1)),
    Lesson(18, "Faults and elasticity", False, (16,), (6, 0)),
    Lesson(19, "Seeing and measuring", True, (1, 7), (5, 2)),
    Lesson(20, "Capstone: 13B on 64 GPUs", True, (4, 11, 12, 14, 16, 17, 19), (6, 1)),
)

# Arrows that would run behind other boxes take the gap between two rows instead: corners on the way, as (column, row).
DETOURS = {(1, 19): ((1.5, 1.5), (4.45, 1.5)), (5, 14): ((1.5, 2.5), (3.5, 2.5))}
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


def here() -> set[int]:
    """Numbers of the lessons whose notebooks this version ships."""
    try:
        return {int(path.name[:2]) for path in notebook.shipped("lessons").glob("[0-9][0-9]*_*.ipynb")}
    except ValueError:
        return set()


def words(states: dict[int, str]) -> str:
    """The map as text: a line a lesson. `*` marks the essentials."""
    done = sum(state == "done" for state in states.values())
    shipped = ", ".join(map(str, sorted(here()))) or "none"
    lines = [
        f"Course map: {done} of {len(LESSONS)} lessons done; lessons in this version: {shipped}.",
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

    now, written = states(), here()
    columns, rows = (max(lesson.place[i] for lesson in LESSONS) + 1 for i in (0, 1))
    figure = AltFigure(figsize=(1.42 * columns, 0.74 * rows + 0.3), facecolor="white")
    axes = figure.add_axes((0.005, 0.01, 0.99, 0.98))
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.6, -0.85)
    for lesson in LESSONS:
        for need in direct(lesson):
            _arrow(axes, need, lesson)
        _box(axes, lesson, now[lesson.number], lesson.number in written)
    key = "thick frame: essential    green: done    orange, hatched: started    white: open    dashed: not in this version"
    axes.text(-0.46, -0.7, key, fontsize=9)
    figure.alt = words(now)
    return figure


def direct(lesson: Lesson) -> list[Lesson]:
    """The prerequisites that no other prerequisite already implies: what the map draws."""
    return [LESSONS[need] for need in lesson.needs if not any(need in implied(LESSONS[other]) for other in lesson.needs)]


def implied(lesson: Lesson) -> set[int]:
    """Everything a lesson stands on, however far back."""
    return set(lesson.needs).union(*(implied(LESSONS[need]) for need in lesson.needs))


def path(tail: Lesson, head: Lesson) -> list[tuple[float, float]]:
    """From the edge of one box to the edge of another: sideways, or straight up or down within a column."""
    (x0, y0), (x1, y1) = tail.place, head.place
    if x0 == x1:
        return [(x0, y0 + (0.3 if y1 > y0 else -0.3)), (x1, y1 + (-0.3 if y1 > y0 else 0.3))]
    return [(x0 + 0.43, y0), *DETOURS.get((tail.number, head.number), ()), (x1 - 0.43, y1)]


def _arrow(axes, tail: Lesson, head: Lesson) -> None:
    *way, start, stop = path(tail, head)
    color = "#333333" if head.essential else "#888888"
    if way:
        axes.plot(*zip(*way, start, strict=True), color=color, linewidth=1, zorder=1)
    look = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", stop, start, arrowprops=look, zorder=1)


def _box(axes, lesson: Lesson, state: str, written: bool) -> None:
    import textwrap

    from matplotlib.patches import FancyBboxPatch

    colour, hatch = LOOKS[state]
    x, y = lesson.place
    box = FancyBboxPatch(
        (x - 0.41, y - 0.28),
        0.82,
        0.56,
        boxstyle="round,pad=0.02,rounding_size=0.06",
        facecolor=colour,
        edgecolor="black",
        hatch=hatch,
        linewidth=2.2 if lesson.essential else 0.8,
        linestyle="-" if written else (0, (4, 2)),
        zorder=2,
    )
    axes.add_patch(box)
    text = "\n".join(textwrap.wrap(f"{lesson.number}. {lesson.title}", 18))
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1} if hatch else None
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, zorder=3, color="black", bbox=paper)
