"""Widgets: one function, `widget(fn, **controls)`, for all of them, and the rank strip of lesson 0.

`fn(values) -> (figure, text)` is pure, fast and starts no ranks. The figure and its words stand above the live part, so a
reopened notebook, the book and a screen reader get them without a click. An error in `fn` is shown in place and recorded.
"""

from __future__ import annotations

import html
import traceback
from collections.abc import Callable, Sequence

from minidist.core.tape import Tape
from minidist.course import session


def widget(fn: Callable[[dict], tuple], **controls: tuple | list) -> None:
    """Draw `fn` at the controls' start values, then again whenever one moves.

    A control is `name=(lowest, highest, step, start)` or, for a choice, `name=[first, second, ...]`; `name` with _ for
    spaces is its visible label. A number is a slider with a number box linked to it, a choice a drop-down list; all work
    from the keyboard. Without ipywidgets the first drawing stays alone.
    """
    if session.grading():
        return
    from IPython.display import HTML, display

    values = {name: limits[0] if isinstance(limits, list) else limits[3] for name, limits in controls.items()}
    display(HTML(_draw(fn, values)))
    try:
        import ipywidgets
    except ImportError:
        return
    picture = ipywidgets.HTML(value="")
    room = max(map(len, controls))  # labels of one width, so that the controls stand in columns
    rows = []
    for name, limits in controls.items():
        make = _choice if isinstance(limits, list) else _control
        rows.append(make(ipywidgets, name, limits, room, values, lambda: _redraw(picture, fn, values)))
    whole = ipywidgets.VBox([*rows, picture])
    session.current.widgets.append(whole)
    display(HTML(NAME_SLIDERS), whole)


# ipywidgets puts a label beside a slider and leaves the handle without a name for screen readers: give it the label's words.
NAME_SLIDERS = """<script>
if (!window.minidistNames) {
  const name = () => document.querySelectorAll('.widget-slider').forEach(slider => {
    const label = slider.querySelector('.widget-label'), handle = slider.querySelector('[role=slider]');
    if (label && handle && !handle.ariaLabel) handle.ariaLabel = label.textContent;
  });
  window.minidistNames = new MutationObserver(name);
  window.minidistNames.observe(document.body, {childList: true, subtree: true});
  name();
}
</script>"""


def _choice(ipywidgets, name, options: list, room: int, values: dict, redraw: Callable[[], None]):
    wide, layout = {"description_width": f"{room}ch"}, {"width": f"calc({room}ch + 14rem)"}
    label = name.replace("_", " ")
    menu = ipywidgets.Dropdown(options=options, value=options[0], description=label, style=wide, layout=layout)

    def chosen(change):
        values[name] = change["new"]
        redraw()

    menu.observe(chosen, "value")
    return menu


def _control(ipywidgets, name, limits: tuple, room: int, values: dict, redraw: Callable[[], None]):
    low, high, step, start = limits
    label = name.replace("_", " ")
    whole = all(isinstance(v, int) for v in (low, high, step, start))
    slider_class, box_class = (
        (ipywidgets.IntSlider, ipywidgets.BoundedIntText) if whole else (ipywidgets.FloatSlider, ipywidgets.BoundedFloatText)
    )
    limits = {"min": low, "max": high, "step": step, "value": start}
    wide, layout = {"description_width": f"{room}ch"}, {"width": f"calc({room}ch + 14rem)"}
    slider = slider_class(**limits, description=label, continuous_update=False, readout=False, style=wide, layout=layout)
    wide, layout = {"description_width": f"{room + 7}ch"}, {"width": f"calc({room + 7}ch + 7rem)"}
    box = box_class(**limits, description=f"{label} (type)", style=wide, layout=layout)
    ipywidgets.link((slider, "value"), (box, "value"))

    def moved(change):
        values[name] = change["new"]
        redraw()

    slider.observe(moved, "value")
    return ipywidgets.HBox([slider, box])


def _redraw(picture, fn: Callable, values: dict) -> None:
    picture.value = _draw(fn, values)


def _draw(fn: Callable, values: dict) -> str:
    """`fn`'s figure and words as HTML; an error as its traceback, which is also recorded for `finish()`."""
    from minidist.core.timeline import picture

    try:
        figure, text = fn(dict(values))
    except Exception as error:
        session.failed(f"a widget's drawing at {values} ended with {type(error).__name__}: {error}")
        return f"<pre>{html.escape(traceback.format_exc(limit=-2))}</pre>"
    return picture(figure, text)


def rank_strip(tapes: Sequence[Tape], at_ms: float):
    """(figure, text) of all ranks at one moment of a run: state, last collective, how long each has been waiting in it."""
    from minidist.core.timeline import AltFigure

    rows = [_moment(tape, at_ms, _start(tapes)) for tape in tapes]
    figure = AltFigure(figsize=(9.0, 0.6 + 0.36 * len(rows)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.4, -1.4)
    for x, head in zip((0.0, 0.14, 0.32, 0.62), ("rank", "state", "last collective", "waiting"), strict=True):
        axes.text(x, -1, head, fontsize=9, weight="bold", va="center")
    for row, (rank, state, last, waiting) in enumerate(rows):
        colour, hatch = {"waiting": ("#E69F00", "//"), "running": ("#56B4E9", ""), "done": ("#DDDDDD", "..")}[state]
        axes.barh(row, 0.02, left=0.115, height=0.6, color=colour, hatch=hatch, edgecolor="black", linewidth=0.8)
        for x, word in zip((0.0, 0.14, 0.32, 0.62), (f"rank {rank}", state, last, waiting), strict=True):
            axes.text(x, row, word, fontsize=9, va="center")
    figure.alt = "\n".join(
        [f"At {at_ms:g} ms after the first launch:"]
        + [f"rank {rank}: {state}, last collective {last}, waiting {waiting}" for rank, state, last, waiting in rows]
    )
    return figure, figure.alt


def _start(tapes: Sequence[Tape]) -> float:
    launches = [line.launch for tape in tapes for line in tape.select()]
    if not launches:
        raise ValueError("the tapes are empty: run a collective first")
    return min(launches)


def _moment(tape: Tape, at_ms: float, start: float) -> tuple[int, str, str, str]:
    now = start + at_ms / 1e3
    launched = [line for line in tape.select() if line.launch <= now]
    if not launched:
        return tape.rank, "running", "none yet", "not at all"
    last = launched[-1]
    name = f"{last.op} #{last.seq} of {last.group}"
    if last.finish is None or last.finish > now:
        return tape.rank, "waiting", name, f"for {(now - last.launch) * 1e3:.0f} ms"
    ahead = len(launched) < len(tape.select())
    return tape.rank, "running" if ahead else "done", name, "not at all"
