"""The mesh: a layout brought to life as process groups. It is passed around; only torch's own connection is global."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from minidist.core import device as devices
from minidist.core.board import Board
from minidist.core.layout import AXES, GROUPS, Layout
from minidist.core.links import Delay
from minidist.core.tape import Tape

TIMEOUT_S = 600.0  # a wait longer than this is a hang; the pool of `ranks` sets a shorter one


def connect(
    rank: int,
    world_size: int,
    rendezvous: str = "env://",
    *,
    backend: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Join the process group of `world_size` ranks.

    `rendezvous` is "env://" (torchrun's contract: MASTER_ADDR, MASTER_PORT) or "file:///path" (one host, no ports). `backend`
    defaults to what the rank's device speaks: nccl or gloo. Blocks until all ranks have come, at most `timeout_s` seconds.
    """
    backend = backend or devices.backend_for(devices.for_rank(rank, world_size))
    if rendezvous.startswith("file://"):
        where = {"store": dist.FileStore(rendezvous.removeprefix("file://"), world_size)}
    else:
        where = {"init_method": rendezvous}
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), **where)


def disconnect() -> None:
    """Leave the process group once every rank has finished talking.

    A gloo rank that leaves early closes connections its peers may still be making, so all meet in a barrier first.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@dataclass
class Wire:
    """What all groups of one rank share: who it is, its tape, its board, its delay line and its patience."""

    rank: int
    device: torch.device
    tape: Tape
    board: Board | None
    check: bool
    """teaching mode: compare every collective with the peers' through the board"""
    timeout_s: float
    delay: Delay | None = None


@dataclass(eq=False)
class Group:
    """Ranks that talk together, seen from one of them."""

    name: str
    ranks: tuple[int, ...]
    """global ranks in order of place"""
    rank: int
    """this process's place in `ranks`"""
    wire: Wire
    handle: dist.ProcessGroup | None = None
    """torch's group; None where there is nobody to talk to"""
    calls: dict[str, int] = field(default_factory=dict)
    """operations launched so far: collectives under the group's name, point-to-point ones under "a->b" """

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def __repr__(self):
        return f"Group({self.name} {list(self.ranks)}, I am {self.rank})"


class Mesh:
    """The groups of `layout` as seen from `rank`.

    Every rank of the job must make its meshes in the same order, since making a group takes all of them. At world size 1
    no process group is needed and every group is alone. `check=True` (teaching mode) needs a `board`.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        *,
        device: torch.device | None = None,
        tape: Tape | None = None,
        board: Board | None = None,
        check: bool = False,
        timeout_s: float = TIMEOUT_S,
    ):
        if dist.is_initialized():
            layout.expect_ranks(dist.get_world_size())
        elif layout.world_size > 1:
            raise ValueError(
                f"a layout of {layout.world_size} ranks in an unconnected process: start it by minidist.ranks.run or torchrun"
            )
        if check and board is None:
            raise ValueError("check=True compares ranks through shared memory: pass a board, or check=False")
        self.layout, self.rank = layout, rank
        self.wire = Wire(rank, device or torch.device("cpu"), tape or Tape(rank), board, check, timeout_s)
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._extra: dict[str, tuple[int, ...]] = {}  # groups made by new_group
        self._groups = {name: self._make(name, layout.groups(name)) for name in GROUPS}

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.layout.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.wire.device

    @property
    def tape(self) -> Tape:
        """Everything this rank has said and heard."""
        return self.wire.tape

    @property
    def delay(self) -> Delay | None:
        """The delay line: None (off), or links that every operation has to cross."""
        return self.wire.delay

    @delay.setter
    def delay(self, delay: Delay | None) -> None:
        self.wire.delay = delay

    @property
    def world(self) -> Group:
        """All ranks."""
        return self._groups["world"]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return self.layout.coordinates(self.rank)

    def group(self, name: str) -> Group:
        """This rank's group of that kind: "world", "pp", "dp", "cp", "tp", "dp_cp", "ep", "expert_dp", "shard", ..."""
        if name not in self._groups:
            raise ValueError(f"no group is called {name!r}: use one of {', '.join(self._groups)}")
        return self._groups[name]

    def new_group(self, ranks: Iterable[int], name: str) -> Group | None:
        """The group of any ranks, made at the first call. All ranks of the world must call this; those outside get None."""
        ranks = tuple(ranks)
        known = self._extra.get(name)
        if name in GROUPS or (known is not None and known != ranks):
            raise ValueError(f"there is a group called {name!r} of other ranks already: use another name")
        if known is None:  # a notebook cell that is run again asks for a group that is there
            self._extra[name] = ranks
            if group := self._make(name, [ranks]):
                self._groups[name] = group
        return self._groups.get(name)

    def twin(self, name: str) -> Group:
        """A second connection among the ranks of `group(name)`, made at the first call, which all ranks of the world make.

        Collectives of one group must come in the same order on all its ranks; those of two groups need no common order.
        """
        key = f"{name} twin"
        if key not in self._groups:
            for ranks in map(tuple, self.layout.groups(name)):
                handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._groups[key] = Group(key, ranks, ranks.index(self.rank), self.wire, handle)
        return self._groups[key]

    def close(self) -> None:
        """Give the connections back; the mesh is of no use afterwards. Every rank does so, with nothing under way.

        An open group is not free: gloo has three threads for each, one of which wakes up a hundred times a second.
        """
        handles = {id(group.handle): group.handle for group in self._groups.values()} | {
            id(handle): handle for handle in self._handles.values()
        }
        self._handles.clear()
        for group in self._groups.values():
            group.handle = None
        for handle in handles.values():
            if handle not in (None, dist.group.WORLD):
                dist.destroy_process_group(handle)

    def renumber(self) -> None:
        """Count operations from 1 again. Every rank must do so, between two runs that left nothing under way."""
        for group in self._groups.values():
            group.calls.clear()

    def _make(self, name: str, groups: Iterable[Iterable[int]]) -> Group | None:
        mine = None
        for ranks in map(tuple, groups):
            handle = self._handle(ranks)
            if self.rank in ranks:
                mine = Group(name, ranks, ranks.index(self.rank), self.wire, handle)
        return mine

    def _handle(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """torch's group of these ranks: made once, shared by all kinds that have the same members."""
        if len(ranks) == 1:
            return None
        if ranks not in self._handles:
            everyone = ranks == tuple(range(self.world_size))
            self._handles[ranks] = dist.group.WORLD if everyone else dist.new_group(list(ranks))
        return self._handles[ranks]

    def __repr__(self):
        axes = " ".join(f"{axis}={getattr(self.layout, axis)}" for axis in AXES)
        return f"Mesh({axes}, rank {self.rank} of {self.world_size} on {self.device})"
