"""Devices. The only file that says "cuda": everything else asks here."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import Tensor

Host = TypeVar("Host", float, int, bool, list)


def gpu_count() -> int:
    """GPUs that torch can use; 0 on a CPU build or a machine without one. Does not initialise them (NVML asks)."""
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def gpu_facts() -> list[dict]:
    """Name, memory in bytes and compute capability of each GPU; [] where there is none. Initialises them."""
    facts = []
    for i in range(gpu_count()):
        gpu = torch.cuda.get_device_properties(i)
        facts.append({"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"})
    return facts


def nccl_version() -> str | None:
    """Version of the NCCL that this torch brings, or None."""
    import torch.distributed as dist

    if not (torch.backends.cuda.is_built() and dist.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def for_rank(rank: int, ranks: int) -> torch.device:
    """The device of a rank: its own GPU where each local rank can have one, else the CPU.

    `LOCAL_RANK` and `LOCAL_WORLD_SIZE` of torchrun's contract count the ranks of this host; else all are taken to be here.
    """
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if 0 < here <= gpu_count():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def all_here(gpus: int) -> list[torch.device]:
    """The first `gpus` GPUs of this host, as far as they are there; the CPU for 0."""
    return [torch.device("cuda", i) for i in range(min(gpus, gpu_count()))] if gpus else [torch.device("cpu")]


def free_host_memory() -> float:
    """Bytes of host memory that can be had without swapping, within a container's limit; inf where that cannot be learnt."""
    free, group = float("inf"), "/sys/fs/cgroup/memory."
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("MemAvailable:"))
        with open(f"{group}max") as limit, open(f"{group}current") as used, open(f"{group}stat") as stat:
            cache = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file"))  # given back when asked for
            free = min(free, float(limit.read().strip().replace("max", "inf")) - float(used.read()) + cache)
    except (OSError, StopIteration):
        pass
    return free


def backend_for(device: torch.device) -> str:
    """The torch.distributed backend whose collectives take this device's tensors without a copy."""
    return "nccl" if device.type == "cuda" else "gloo"


def is_gpu(x: Tensor | torch.device) -> bool:
    """Whether a tensor or device is on a GPU."""
    return (x.device if isinstance(x, Tensor) else x).type == "cuda"


def name_of(device: torch.device) -> str:
    """The name that `core.hardware` looks up: the GPU's, or "cpu"."""
    return torch.cuda.get_device_properties(device).name if is_gpu(device) else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until all work launched on the device is done. Nothing to do on a CPU, where launching is doing."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def staging(x: Tensor) -> Tensor:
    """Host memory of the shape and dtype of `x`, into which a GPU can copy while it computes."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=is_gpu(x))


def host(x: Tensor, *, expect: Host) -> Host:
    """Read a device value on the host: the one place where the step waits for the device.

    A scalar comes back as Python's number, anything else as a list. `expect` is what a dry run, whose tensors hold no
    values, goes on with (finite, all tokens valid, tokens spread evenly over experts).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(x, FakeTensor) or x.is_meta:
        return expect
    return x.item() if x.dim() == 0 else x.tolist()
