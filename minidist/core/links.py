"""The delay line: links of a stated latency and bandwidth, so that a laptop can feel like a cluster. Off by default."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Link:
    """A wire that every operation of a rank crosses one after another: each takes `latency_s + sent / bytes_per_s`.

    The latency is paid once an operation, not once a step of its algorithm. The transfer begins when all peers are there
    (the real operation has completed) and the link is free.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self):
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(
                f"a link of {self.latency_s} s and {self.bytes_per_s} bytes/s: give latency >= 0 and bandwidth > 0"
            )

    def book(self, ready: float, nbytes: float) -> float:
        """Occupy the link with `nbytes` from the moment `ready` (or when it is free); returns when they are across."""
        with self._lock:  # completions arrive on the backend's threads
            self.free_at = max(ready, self.free_at) + self.latency_s + nbytes / self.bytes_per_s
            return self.free_at


@dataclass
class Delay:
    """Two classes of link: inside a server of `ranks_per_host` consecutive ranks, and outside.

    `Delay(Link(1e-3, 1e9))` puts all ranks on one kind of wire. An operation whose group spans two servers goes outside.
    """

    inside: Link
    outside: Link | None = None
    ranks_per_host: int = 0

    def __post_init__(self):
        if (self.outside is None) != (self.ranks_per_host == 0):
            raise ValueError("a delay line with an outside link needs ranks_per_host > 0, and the reverse")

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The link that an operation among these global ranks crosses."""
        if self.outside and len({rank // self.ranks_per_host for rank in ranks}) > 1:
            return self.outside
        return self.inside
