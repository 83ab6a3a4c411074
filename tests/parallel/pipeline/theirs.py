"""The schedules of torch.distributed.pipelining, made without ranks, and read through the CSV form."""

from types import SimpleNamespace

import torch
from torch.distributed.pipelining import schedules as torchs

from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.text import from_csv

NAMES = {  # ours: torch's
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def engine(name: str, p: int, m: int, v: int = 1, rank: int = 0):
    """Torch's object for one of our names (or a class of it), as a rank would have it, over stages that hold nothing."""
    kind = getattr(torchs, NAMES.get(name, name))
    shared = {"num_stages": p * v, "group_size": p, "group_rank": rank, "is_first": False, "is_last": False}
    stages = [SimpleNamespace(stage_index=rank + chunk * p, submod=torch.nn.Identity(), **shared) for chunk in range(v)]
    return kind(stages[0] if issubclass(kind, torchs.PipelineScheduleSingle) else stages, m)


def performed(name: str, p: int, m: int, rank: int) -> list[str]:
    """What a schedule of one chunk runs on a rank, noted by a stage. (Torch 2.13's table for 1F1B begins with F1 on the last
    rank, which its run does not.)"""
    cells, one = [], engine(name, p, m, rank=rank)
    for kind, verb in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
        setattr(one._stage, verb, lambda micro, *_, kind=kind, **__: cells.append(f"{rank}{kind}{micro}"))
    for verb in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        setattr(one._stage, verb, lambda micro: [])
    one._stage.perform_reduce_grad = one._initialize_stage = lambda *_: None
    one._step_microbatches()
    return cells


def csv_of(order: dict) -> str:
    """A pipeline order as torch writes it."""
    return "".join(",".join("" if cell is None else str(cell) for cell in order[rank]) + "\n" for rank in sorted(order))


def schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Torch's schedule as one of ours, through the CSV that torch would write."""
    if name in ("gpipe", "1f1b"):
        return from_csv(csv_of({rank: performed(name, p, m, rank) for rank in range(p)}), name)
    return from_csv(csv_of(engine(name, p, m, v).pipeline_order), name)
