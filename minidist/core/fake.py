"""The fake backend: one process poses as rank k of N, and every collective returns at once without talking to anyone.

The dry run stands on it. torch keeps it in a private module, so this is the only file that names that module.
"""

from __future__ import annotations

import torch.distributed as dist


def connect_fake(rank: int, world_size: int) -> None:
    """Join a process group of `world_size` ranks that do not exist. Meshes, groups and collectives then work as ever."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
