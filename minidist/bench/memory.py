"""`minidist bench memory`: what a rank holds at ZeRO's four stages, by kind, measured beside the closed forms, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidist import ranks as pool
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model import flops
from minidist.model.loss import loss_sum
from minidist.plan.memory import state_bytes
from minidist.train import config as configs
from minidist.train import memory
from minidist.train.build import runtime
from minidist.train.config import Config
from minidist.train.step import Step

STAGES = (0, 1, 2, 3)
# Kind -> colour (Okabe and Ito's, safe for colour-blind eyes) and hatch, which tells them apart without colours.
LOOKS = {
    "weights": ("#0072B2", ""),
    "gathered": ("#56B4E9", "//"),
    "gradients": ("#E69F00", ".."),
    "master": ("#009E73", "\\\\"),
    "moments": ("#CC79A7", "xx"),
    "activations": ("#999999", "--"),
}


@dataclass(frozen=True)
class Row:
    """The fullest rank at one stage, in bytes."""

    stage: int
    ranks: int
    parameters: int
    padding: int
    """elements beside the parameters that make the flat buffers divide"""
    held: dict[str, int]
    """between two steps, by kind"""
    most: dict[str, int]
    """most of each kind within a step, with weights gathered, gradients on their way, and activations of one sequence"""
    closed_form: dict[str, float]
    """of `held`, without padding"""


def check(ranks: int) -> None:
    """Refuse what cannot be measured. ValueError with option, value and remedy."""
    if ranks < 1:
        raise ValueError(f"--ranks {ranks}: give at least 1")


def run(ranks: int) -> list[Row]:
    """Two steps of the recipe `tiny` in bf16 at each stage, on local ranks."""
    rows = []
    for stage in STAGES:
        config = configs.load("tiny", ["--precision.dtype=bfloat16", f"--layout.zero={stage}"], ranks=ranks)
        seen = pool.run(measure, ranks, config, layout=config.layout, timeout_s=600.0, check=False)
        parameters = flops.parameters(config.model)
        held, most, padding = max(seen, key=lambda one: sum(one[0].values()))
        rows.append(Row(stage, ranks, parameters, padding, held, most, state_bytes(parameters, ranks, stage)))
    return rows


def measure(mesh: Mesh, config: Config) -> tuple[dict[str, int], dict[str, int], int]:
    """The program of a rank: (bytes held between steps, most of each kind within one, elements of padding)."""
    step = Step(runtime(mesh, config), mesh, config)
    batch = Batch.empty(1, config.train.seq_len)
    batch.targets[:] = 1
    step.run([batch])
    held = memory.held(step)
    most = dict(held)

    def look(*_: object) -> None:
        for kind, size in memory.held(step).items():
            most[kind] = max(most[kind], size)

    for module in step.zero.model.modules():
        module.register_forward_pre_hook(look)
    for parameter in step.zero.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    step.run([batch])
    return held, most | {"activations": _activations(step, batch)}, memory.padding(step)


def _activations(step: Step, batch: Batch) -> int:
    """Bytes that one micro-batch's forward keeps for its backward."""
    zero = step.zero
    zero.start_step()
    zero.before_backward(last=True)
    with memory.activations(step) as kept:
        loss = loss_sum(zero.model(batch.tokens, batch.positions, batch.documents), batch.targets)
        found = kept()
    loss.backward()
    zero.after_backward()
    zero.finish()
    return found


def table(rows: Sequence[Row]) -> str:
    """Bytes a parameter, measured and by the closed form, for a person."""
    lines = ["stage  " + "".join(f"{kind:>11}" for kind in memory.KINDS) + "        all   closed form   within a step"]
    for one in rows:
        each = [one.held[kind] / one.parameters for kind in memory.KINDS]
        form, most = (
            sum(values[kind] for kind in values if kind != "activations") / one.parameters
            for values in (one.closed_form, one.most)
        )
        lines.append(f"{one.stage:<7}" + "".join(f"{x:11.3f}" for x in each) + f"{sum(each):11.3f}{form:14.3f}{most:16.3f}")
    first = rows[0]
    head = (
        f"bytes a parameter on the fullest of {first.ranks} ranks; {first.parameters:,} parameters in bf16, gradients in fp32"
    )
    return "\n".join([head, *lines])


def plot(rows: Sequence[Row], out: Path) -> None:
    """One bar a stage: what a rank holds at most in a step, by kind, in MB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for k, one in enumerate(rows):
        left = 0.0
        for kind, (colour, hatch) in LOOKS.items():
            size = one.most[kind] / 1e6
            label = kind if k == 0 else None
            axes.barh(k, size, left=left, height=0.6, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += size
        axes.text(left, k, f" {left:.1f} MB", va="center")
    first = rows[0]
    axes.set_yticks(range(len(rows)), [f"stage {one.stage}" for one in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MB on one rank, at most within a step")
    axes.set_title(f"{first.parameters / 1e6:.2f} M parameters in bf16 on {first.ranks} ranks")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out, dpi=110)
