"""The check that a node, or a rank on its device, passes before it takes part; one that fails is left out, by name and reason.

A launcher runs it once a node before it starts ranks there, in a process of its own, so that a node on which it hangs or dies
has failed too:

    srun --ntasks-per-node=1 python -m minidist.faults.health --folder runs --gpus 8 > health.jsonl

One JSON object a node; exit code 0, or `GONE` where something is wrong. `sort_out` reads the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from minidist.core import device as devices
from minidist.core import probe

GONE = 69  # exit code: EX_UNAVAILABLE of sysexits.h, "do not start me here again"
PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Needs:
    """What a node has to have."""

    gpus: int = 0
    """GPUs that torch must see; 0 where ranks run on the CPU"""
    disk_bytes: int = 100 << 20
    """free bytes where the run is written"""
    memory_bytes: int = 500 << 20
    """free bytes of host memory"""


@dataclass(frozen=True)
class Health:
    """What was found on a node."""

    node: str
    faults: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether it may take part."""
        return not self.faults

    def __str__(self):
        return f"{self.node}: {'; '.join(self.faults) or 'good'}"


def examine(folder: Path, needs: Needs | None = None, device: torch.device | None = None) -> Health:
    """Examine this node for a run that is written to `folder`: GPUs there, `device` (default: all of the node's) right in its
    sums and memory, memory and disk free, the folder keeps what is written, a collective over loopback. Well under a second
    on a CPU; never raises."""
    needs = needs or Needs()
    places = [device] if device else devices.all_here(needs.gpus)
    checks = [lambda: _gpus(needs.gpus), lambda: _memory(needs.memory_bytes), lambda: _disk(folder, needs.disk_bytes)]
    for place in places:
        checks += [lambda place=place: probe.arithmetic(place), lambda place=place: probe.memory(place)]
    found = []
    for check in [*checks, probe.loopback]:
        try:
            found.append(check())
        except Exception as error:  # whatever it is, it is what is wrong with this node
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return Health(socket.gethostname(), tuple(filter(None, found)))


def sort_out(lines: Iterable[str], nodes: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The nodes that are good, and those to be left out with the reason, by what `main` has printed on each of them."""
    said = {}
    for line in filter(str.strip, lines):
        found = json.loads(line)
        said[found["node"]] = "; ".join(found["faults"])
    reasons = {node: said.get(node, "gave no answer") for node in nodes}
    return [node for node, reason in reasons.items() if not reason], {n: reason for n, reason in reasons.items() if reason}


def _gpus(wanted: int) -> str:
    seen = devices.gpu_count()
    return f"{seen} of {wanted} GPUs are visible" if seen < wanted else ""


def _memory(least: int) -> str:
    free = devices.free_host_memory()
    return f"{free / 1e6:.0f} MB of host memory are free, {least / 1e6:.0f} MB are needed" if free < least else ""


def _disk(folder: Path, least: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < least:
        return f"{free / 1e6:.0f} MB of disk are free for {folder}, {least / 1e6:.0f} MB are needed"
    path, data = folder / f".health-{socket.gethostname()}-{os.getpid()}", os.urandom(PROBE_BYTES)
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        kept = path.read_bytes() == data
    finally:
        path.unlink(missing_ok=True)
    return "" if kept else f"{folder} does not keep what is written to it"


def main(arguments: list[str] | None = None) -> int:
    """Examine this node and print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m minidist.faults.health", description=examine.__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the run is written; default %(default)s")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that must be there; default %(default)s")
    args = parser.parse_args(arguments)
    found = examine(args.folder, Needs(gpus=args.gpus))
    print(json.dumps(asdict(found)), flush=True)
    return 0 if found.good else GONE


if __name__ == "__main__":
    sys.exit(main())
