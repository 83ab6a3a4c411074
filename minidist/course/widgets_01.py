"""Lesson 1's figures: the roofline, the memory ladder of this machine, and what a kernel occupies of a GPU.

All on `plan.roofline` and `plan.occupancy`; nothing here measures. Each returns (figure, words).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minidist.core import hardware
from minidist.plan import occupancy, roofline
from minidist.plan.roofline import Machine, Work

# Okabe and Ito's colours, with a marker each so that no colour is needed to tell them apart
MARKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
LINES = ("-", "--", "-.", ":")


def presets() -> dict[str, Machine]:
    """The roofs that the widget knows besides the learner's own: data sheets, and one recorded core."""
    sheets = {device.reported: device for device in hardware.DEVICES}
    return {
        "H100": roofline.machine(sheets["NVIDIA H100 80GB HBM3"]),
        "A100": roofline.machine(sheets["NVIDIA A100-SXM4-80GB"]),
        "laptop GPU": roofline.machine(hardware.LAPTOP, "float32"),
        "recorded CPU core": roofline.machine(hardware.RECORDED_CPU, "float32"),
    }


def roofline_figure(machine: Machine, points: dict[str, Sequence[tuple[Work, float]]], op: tuple[str, Work] | None = None):
    """The roof of `machine`; measured points `{label: [(work, seconds), ...]}`; and one operation, put where it could be.

    Both axes are logarithmic: intensity in FLOPs a byte, and FLOP/s.
    """
    from minidist.core.timeline import AltFigure

    figure = AltFigure(figsize=(7.6, 4.1), facecolor="white")
    axes = figure.add_axes((0.1, 0.13, 0.88, 0.72))  # a layout engine would double the drawing time
    marks = [work.intensity for found in points.values() for work, _ in found] + [machine.ridge]
    marks += [op[1].intensity] if op else []
    low, high = min(marks) / 3, max(marks) * 4
    roof = [roofline.attainable(x, machine) for x in (low, machine.ridge, high)]
    axes.plot((low, machine.ridge, high), roof, color="black", linewidth=2)
    axes.axvline(machine.ridge, color="#666666", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"ridge {machine.ridge:.3g}", (machine.ridge, roof[0] * 1.2), fontsize=9, xytext=(4, 0), textcoords="offset points"
    )
    for (label, found), (colour, mark) in zip(points.items(), MARKS, strict=False):
        xs, ys = [work.intensity for work, _ in found], [work.flops / s for work, s in found]
        axes.plot(xs, ys, mark, color=colour, label=label, markersize=6, markerfacecolor="none", markeredgewidth=1.6)
    if op:
        y = roofline.attainable(op[1].intensity, machine)
        axes.plot([op[1].intensity], [y], "*", color="#D55E00", markersize=15, markeredgecolor="black", label=op[0])
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: amount(value).strip())  # plain words: powers as formulas take 100 ms
    axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.set_xlabel("intensity: FLOPs for each byte moved")
    axes.set_ylabel("FLOP/s")
    axes.set_title(f"The roofline of {machine.name}", loc="left", fontsize=11, pad=22)
    axes.grid(alpha=0.3)
    if points or op:  # above the axes: inside, some roof runs behind it
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=3, frameon=False, fontsize=9)
    figure.alt = _roof_words(machine, points, op)
    return figure, figure.alt


def _roof_words(machine: Machine, points: dict, op: tuple[str, Work] | None) -> str:
    lines = [
        f"The roofline of {machine.name}: {flops(machine.peak)} at most, {amount(machine.bandwidth)}B/s of memory, "
        f"ridge at {machine.ridge:.3g} FLOPs a byte."
    ]
    for label, found in points.items():
        left = sum(roofline.bound(work, machine) == "memory" for work, _ in found)
        best = max(work.flops / s for work, s in found)
        lines.append(
            f"{label}: {len(found)} points, {left} of them left of the ridge (memory); the best reaches {flops(best)}."
        )
    if op:
        label, work = op
        reach = roofline.attainable(work.intensity, machine)
        lines.append(
            f"{label}: intensity {work.intensity:.4g}, so the bound is {roofline.bound(work, machine)}; "
            f"it can reach {flops(reach)}, {reach / machine.peak:.0%} of the peak."
        )
    return "\n".join(lines)


def linear_on(machine: Machine, measured: dict, values: dict):
    """The widget: a (batch, width) @ (width, width) product on a roof, the batch given as a power of two.

    Two bytes an element where the peak is of a 16-bit format, four elsewhere (`values["bytes_an_element"]` says which).
    """
    batch, width, itemsize = 2 ** values["batch_is_2_to_the"], values["width"], values["bytes_an_element"]
    work = roofline.matmul(batch, width, width, itemsize)
    return roofline_figure(machine, measured, (f"batch {batch}, width {width}, {itemsize} bytes", work))


def ladder_figure(sizes: Sequence[float], rates: Sequence[float]):
    """Bytes/s of an add against the bytes it touches: each cache is a step, and the left end is launch cost."""
    from minidist.core.timeline import AltFigure

    figure = AltFigure(figsize=(7.6, 3.3), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, rates, "-s", color="#D55E00", markerfacecolor="white", markeredgewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: amount(value).strip())
    axes.set_xticks(sizes, [f"{amount(size)}B" for size in sizes], fontsize=8, rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("bytes touched by one add (two tensors in, one out)")
    axes.set_ylabel("bytes/s")
    axes.set_title("The memory ladder of this machine, climbed by one add", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    best = max(range(len(rates)), key=lambda i: rates[i])
    figure.alt = (
        f"Bytes a second of an add by its size. {amount(sizes[0])}B: {amount(rates[0])}B/s, the launch takes the time. "
        f"Best at {amount(sizes[best])}B: {amount(rates[best])}B/s, from a cache. "
        f"{amount(sizes[-1])}B: {amount(rates[-1])}B/s, from main memory."
    )
    return figure, figure.alt


def kernel_on_gpu(device: hardware.Device, values: dict):
    """The widget: the last wave of a grid on all SMs, and the warp slots of one SM."""
    fits = occupancy.occupancy(
        device.sm, values["threads_a_block"], values["registers_a_thread"], values["shared_KB_a_block"] * 1024
    )
    wave = occupancy.waves(values["blocks"], device.sms, fits.blocks)
    return occupancy_figure(device, fits, wave)


def occupancy_figure(device: hardware.Device, fits: occupancy.Occupancy, wave: occupancy.Waves):
    """SMs, warps and occupancy in one figure: left every SM in the last wave, right the warp slots of a full one."""
    from minidist.core.timeline import AltFigure

    figure = AltFigure(figsize=(8.8, 3.4), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    columns, busy = 12, min(wave.last, device.sms)
    _squares(left, device.sms, columns, busy)
    right.set_anchor("N")
    left.set_title(f"last wave of {wave.waves}: {busy} of {device.sms} SMs have a block", loc="left", fontsize=10)
    _squares(right, device.sm.warps, 8, fits.warps, group=fits.warps // fits.blocks)
    right.set_title(f"a full SM: {fits.warps} of {device.sm.warps} warps", loc="left", fontsize=10)
    figure.alt = (
        f"{device.name}: {wave.waves} wave{'s' * (wave.waves > 1)} of at most {device.sms} x {fits.blocks} blocks; "
        f"in the last, {busy} of {device.sms} SMs have work. Slots used over all waves: {wave.share:.1%}.\n"
        f"One full SM holds {fits.blocks} block{'s' * (fits.blocks > 1)}, {fits.warps} of {device.sm.warps} warps: "
        f"occupancy {fits.share:.0%}, limited by {fits.limit}."
    )
    return figure, figure.alt


def _squares(axes, total: int, columns: int, busy: int, group: int = 1) -> None:
    """A grid of `total` squares, the first `busy` filled; neighbouring groups differ in hatch."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    looks = (("#56B4E9", ""), ("#56B4E9", "////"), ("white", ""))
    kinds: list[list] = [[], [], []]
    for i in range(total):
        kind = 2 if i >= busy else (i // group) % 2 if group > 1 else 0
        kinds[kind].append(Rectangle((i % columns, i // columns), 0.86, 0.86))
    for patches, (colour, hatch) in zip(kinds, looks, strict=True):
        axes.add_collection(PatchCollection(patches, facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.7))
    axes.set_xlim(-0.2, columns)
    axes.set_ylim(math.ceil(total / columns), -0.2)
    axes.set_aspect("equal")
    axes.set_axis_off()


def flops(rate: float) -> str:
    """A rate of arithmetic in words: "989 TFLOP/s"."""
    return f"{amount(rate)}FLOP/s"


def amount(value: float) -> str:
    """Three digits and a prefix of thousands, ready for a unit: 3.35e12 -> "3.35 T"."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:  # what three digits round up to it, too: "1 T", not "1e+03 G"
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "
