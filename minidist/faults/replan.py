"""Fewer ranks: the layout with which a job goes on when some are gone. The global batch stays, so the training does too.

What is given up, first to last: data-parallel replicas, then places of expert parallelism, which only borrows ranks of those,
then context, pipeline and tensor parallelism. The last three were chosen so that a model fits its ranks; data parallelism was
chosen for speed. So a rank may stay idle before another has to hold more of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from minidist.core.layout import Layout

NEEDS = {"tp": ("sp", "sp_regather"), "cp": ("cp_attention",), "pp": ("schedule", "chunks", "split")}
"""axis -> settings that mean nothing without it"""


def replan(layout: Layout, ranks: int, expect: Callable[[Layout], None]) -> Layout:
    """The best legal layout on at most `ranks` ranks.

    `expect(layout)` raises ValueError for a layout that the model, the batch or a schedule does not allow. Candidates come in
    this order: the largest tp, of those the largest pp, cp, ep, and of those the largest dp; none is larger than it was but dp,
    which takes what the others leave of the ranks. ValueError where none is legal.
    """
    reason = f"{ranks} ranks are none"
    for candidate in _candidates(layout, ranks):
        try:
            one = candidate()
            expect(one)
            return one
        except ValueError as error:
            reason = str(error)
    raise ValueError(f"no layout of at most {ranks} ranks can go on with this run: {reason}")


def _candidates(layout: Layout, ranks: int) -> Iterator[Callable[[], Layout]]:
    """Makers of layouts, best first; one may raise ValueError."""
    for tp in range(layout.tp, 0, -1):
        for pp in range(layout.pp, 0, -1):
            for cp in range(layout.cp, 0, -1):
                most = ranks // (tp * pp * cp)
                for ep in range(layout.ep, 0, -1):
                    for dp in range(most, 0, -1):
                        if dp * cp % ep == 0:
                            yield lambda tp=tp, pp=pp, cp=cp, ep=ep, dp=dp: _sized(layout, tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)


def _sized(layout: Layout, **sizes: int) -> Layout:
    """The layout with these sizes. What an axis of 1 has no use for goes back to its default, and so does a pipeline's cut in
    numbers, which was made for another number of stages."""
    changes: dict[str, object] = dict(sizes)
    for axis, names in NEEDS.items():
        if sizes[axis] == 1:
            changes |= {name: getattr(Layout, name) for name in names}
    if sizes["pp"] != layout.pp and layout.split not in ("even", "cost"):
        changes["split"] = "even"
    places = sizes["dp"] * sizes["cp"]
    if layout.shard:
        changes["shard"] = max(size for size in range(1, min(layout.shard, places) + 1) if places % size == 0)
    return replace(layout, **changes)
