"""What can be set of a run, section by section. The text under a field is what `minidist train --help` prints.

The sections `model`, `layout` and `recompute` stand beside what they set up: `model/config.py`, `core/layout.py` and
`parallel/config.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


def _runs() -> str:
    return os.environ.get("MINIDIST_RUNS") or "runs"


@dataclass(frozen=True)
class Run:
    """Where a run lives and what its randomness starts from."""

    name: str = "run"
    """name of the run: its files lie in the folder DIR/NAME, or NAME-2, NAME-3, ... so that no run replaces another"""
    dir: str = field(default_factory=_runs)
    """the folder that holds runs; $MINIDIST_RUNS where that is set"""
    seed: int = 1
    """of the initial weights, the order of samples and dropout; none of them depends on the layout"""

    @property
    def folder(self) -> Path:
        """The folder of this run: config.toml, metrics.jsonl, loss.png and checkpoints/ lie in it."""
        return Path(self.dir) / self.name


@dataclass(frozen=True)
class Data:
    """The text and its tokens."""

    source: str = "stdlib"
    """"stdlib" (the source text of this Python's own standard library, no download) or a folder made by
    `minidist data build`"""
    tokenizer: str | None = None
    """byte (256 tokens) or bpe:N (N tokens, trained on the text). Default: byte for stdlib; a built folder has its own,
    and stating another one is refused"""
    prefetch: int = 2
    """optimizer steps whose tokens are read ahead by a thread; 0 reads them when they are needed"""


@dataclass(frozen=True)
class Train:
    """The length and the batch of the run."""

    steps: int = 200
    """optimizer steps"""
    global_batch: int = 24
    """sequences an optimizer step, over all ranks; need not divide by layout.dp"""
    micro_batch: int = 8
    """most sequences that one rank runs forward at once"""
    accumulation: int | None = None
    """micro-batches a rank runs before each optimizer step. Follows from the batch sizes; state it to have
    layout.dp x micro_batch x accumulation = global_batch checked"""
    seq_len: int = 256
    """tokens of a sequence"""
    eval_every: int = 100
    """steps between two evaluations on the held-out part; 0 evaluates only after the last step"""
    eval_samples: int = 0
    """held-out sequences of an evaluation during the run, spread evenly; 0 takes all. The last evaluation takes all"""
    sample_tokens: int = 200
    """tokens of the sample that is printed after the last step; 0 prints none"""
    sample_prompt: str = "def "
    """the text that the sample goes on from"""


@dataclass(frozen=True)
class Optim:
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (Loshchilov and Hutter, 2019) or sgd"""
    lr: float = 1e-3
    """peak learning rate"""
    warmup: int = 20
    """optimizer steps over which the learning rate rises linearly to lr"""
    min_lr_ratio: float = 0.1
    """the cosine ends at this share of lr; 1 keeps the rate constant after the warm-up"""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay of the first and second moment"""
    eps: float = 1e-8
    """adamw: added to the root of the second moment"""
    momentum: float = 0.0
    """sgd: share of the last update that is kept"""
    weight_decay: float = 0.1
    """applied to matrices only, never to norms; adamw takes it from the weights, sgd adds it to the gradients"""
    clip: float = 1.0
    """largest norm of the whole gradient; larger ones are scaled down to it. 0 never clips"""
    offload: bool = False
    """keep master weights and moments in host memory, and update them there: slower, and free of the device's memory"""


Float = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """Number formats. Master weights, which the optimizer updates, are in float32, or in `dtype` where that is wider."""

    dtype: Float = "float32"
    """of weights and activations in forward and backward; float64 is for proofs"""
    reduce: Float | None = None
    """in which gradients travel and are summed over the ranks. Default: that of the master weights"""
    accumulate: Float | None = None
    """in which gradients are kept and summed over micro-batches. Default: that of the master weights"""
    moments: Float | None = None
    """in which the optimizer's moments are kept between steps. Default: that of the master weights"""
    loss_scale: float | None = None
    """the loss is multiplied by it before backward, and the gradients divided by it before clipping. Default: 65536 with
    float16, whose smallest numbers gradients would fall below, and 1 otherwise. With float16 it moves: halved when a
    gradient overflows"""
    scale_window: int = 2000
    """steps in a row without an overflow after which the loss scale of float16 is doubled"""


@dataclass(frozen=True)
class Checkpoint:
    """When the state of the run is saved, how many of the saves are kept, and whether the run goes on from one."""

    every: int = 0
    """optimizer steps between two checkpoints, and the most that is lost when a rank dies; 0 saves only after the last step"""
    keep: int = 2
    """finished checkpoints that are kept, the last saved ones; 0 keeps all. One whose numbers are not finite never takes the
    place of one whose are"""
    background: bool = True
    """write while training goes on: a step waits for the copy to host memory only, which takes as much of it as the state"""
    on_error: Literal["stop", "continue"] = "stop"
    """when a checkpoint could not be written: end the run, or say so and go on"""
    resume: bool = False
    """go on with the run of this name, from its last good checkpoint; begin it where it has none. `minidist train --resume`"""
    init: str | None = None
    """a run folder or checkpoint whose weights a new run starts from, at any layout; default: drawn from run.seed"""


@dataclass(frozen=True)
class Metrics:
    """What is said while the run goes on."""

    print_every: int = 10
    """steps between two lines of a log; a terminal shows every step. metrics.jsonl always has them all"""
    plot: bool = True
    """draw the loss curves into loss.png after the last step"""
    peak_tflops: float = 0.0
    """10^12 FLOPs a second of one device at its best, for MFU; 0 looks the device up, and MFU is left out
    where it is not known"""
    trace: str = ""
    """steps whose work and communication are written into trace/, one file a rank, such as 5 or 2-4; none where it is empty.
    `minidist train --trace` takes steps 2 to 4"""
