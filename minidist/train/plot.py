"""Loss curves of one or several runs as a PNG, told apart by marker and dash as well as by colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minidist.train import metrics

# Colour (Okabe and Ito's, safe for colour-blind eyes), line, marker. The first is broad and pale, so that a curve which
# lies exactly on it stays visible.
STYLES = (
    {"color": "#56B4E9", "linestyle": "-", "linewidth": 5, "marker": ""},
    {"color": "#000000", "linestyle": "--", "linewidth": 1.4, "marker": "o"},
    {"color": "#D55E00", "linestyle": ":", "linewidth": 1.6, "marker": "^"},
    {"color": "#009E73", "linestyle": "-.", "linewidth": 1.4, "marker": "s"},
)


def plot_losses(runs: dict[str, Path], out: Path, title: str = "") -> str:
    """Draw the training and held-out loss of each `metrics.jsonl` (label -> path) into `out`; the alternative text.

    The text says what the picture says: first and last loss of each run, and how far the curves lie apart at most.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: it would open a window system where there is one

    curves = {label: _curves(path) for label, path in runs.items()}
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (label, (train, held_out)) in enumerate(curves.items()):
        style = STYLES[i % len(STYLES)]
        spread = max(1, len(train) // 12)
        axes.plot(*_xy(train), label=label, markevery=(i * spread // 3, spread), markersize=5, **style)
        if held_out:
            axes.plot(
                *_xy(held_out),
                linestyle="none",
                marker="Dx+*"[i % 4],
                markersize=11 - 3 * (i % 2),
                color=style["color"],
                label=f"{label}, held out",
            )
    axes.set(xlabel="optimizer step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, metadata={"Description": alternative(curves)})
    return alternative(curves)


def alternative(curves: dict[str, tuple[dict[int, float], dict[int, float]]]) -> str:
    """The figure in words."""
    parts = []
    for label, (train, held_out) in curves.items():
        steps = sorted(train)
        first, last = steps[0], steps[-1]
        text = f"{label}: training loss from {train[first]:.3f} at step {first} to {train[last]:.3f} at step {last}"
        if held_out:
            text += f", held-out loss {held_out[max(held_out)]:.3f} at step {max(held_out)}"
        parts.append(text)
    if len(curves) > 1:
        first, *others = [train for train, _ in curves.values()]
        common = [step for step in first if all(step in other for other in others)]
        apart = max((abs(first[step] - other[step]) for other in others for step in common), default=0.0)
        parts.append(f"the training curves lie at most {apart:.2g} nats apart")
    return "; ".join(parts)


def _curves(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Step -> training loss and step -> held-out loss of one run."""
    rows = list(metrics.read(path))
    train, held_out = (_column(rows, key) for key in ("loss", "val_loss"))
    if not train:
        raise ValueError(f"{path}: no step has a loss yet, nothing to draw")
    return train, held_out


def _column(rows: list[dict[str, Any]], key: str) -> dict[int, float]:
    return {row["step"]: float(row[key]) for row in rows if row.get(key) is not None}


def _xy(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())
