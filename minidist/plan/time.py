"""Time on a link and what overlap hides: the alpha-beta model of a wire, its fit, and the timeline of gradient buckets.

One message of b bytes takes alpha + b / beta seconds (Hockney 1994): alpha is paid for talking at all, beta is the
bandwidth. A ring's all-reduce is 2(n-1) messages one after another, each of an n-th of the tensor. Buckets cross one link
one at a time, in order of launch (Li et al. 2020, "PyTorch Distributed", section 4), so their timeline is one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from minidist.core.tape import Bytes, Line, Tape, booked


@dataclass(frozen=True)
class LinkModel:
    """A wire of latency `alpha_s` seconds a message and bandwidth `bytes_per_s`."""

    alpha_s: float
    bytes_per_s: float

    def __post_init__(self):
        if not (self.alpha_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"a link of {self.alpha_s} s and {self.bytes_per_s} bytes/s: give alpha >= 0 and bandwidth > 0")

    def message_s(self, nbytes: Bytes) -> float:
        """Seconds for one message."""
        return self.alpha_s + nbytes / self.bytes_per_s

    def ring_all_reduce_s(self, payload: Bytes, n: int) -> float:
        """Seconds for an all-reduce of `payload` bytes over `n` ranks: 2(n-1) steps, and the booked bytes at full speed."""
        steps = 2 * (n - 1)
        return steps * self.alpha_s + booked("all_reduce", payload, n) / self.bytes_per_s

    def delayed_all_reduce_s(self, payload: Bytes, n: int) -> float:
        """The same on the engine's delay line (`core.links.Link`), which charges its latency once an operation."""
        return 0.0 if n == 1 else self.message_s(booked("all_reduce", payload, n))


def fit(points: Sequence[tuple[Bytes, float]]) -> LinkModel:
    """The link that explains measured messages (bytes, seconds) best, by least squares of the relative error.

    Relative, because a plain sum of squares hears the largest message alone and gets alpha from its noise. Alpha is not
    negative. Raises ValueError where the points do not tell alpha from beta.
    """
    if any(seconds <= 0 or nbytes < 0 for nbytes, seconds in points):
        raise ValueError("a message of a negative size, or one that took no time: measure again, with a clock that resolves it")
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ValueError(f"{len(points)} measurements of one size: measure at least two sizes, far apart")
    weights = [seconds**-2 for _, seconds in points]
    total = sum(weights)
    mean_b = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - mean_b) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - mean_b) * (s - mean_s) for w, (b, s) in zip(weights, points, strict=True)) / spread
    alpha = mean_s - slope * mean_b
    if alpha < 0:  # the best line through the origin instead
        alpha, slope = 0.0, sum(b / s for b, s in points) / sum((b / s) ** 2 for b, s in points)
    if slope <= 0:
        raise ValueError("larger messages did not take longer: measure larger ones, until they do")
    return LinkModel(alpha, 1 / slope)


def pack(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Places of `sizes` grouped into buckets, in order: a bucket closes before the size that would take it past the limit.

    A size above the limit has a bucket to itself.
    """
    buckets: list[list[int]] = []
    room = -1
    for place, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(place)
        room -= size
    return buckets


@dataclass(frozen=True)
class Bucket:
    """One reduction: its bytes, when its last gradient is there, and when its sum is. Seconds from backward's start."""

    payload: int
    launch_s: float
    finish_s: float


@dataclass(frozen=True)
class Overlap:
    """Backward and the reductions under it."""

    backward_s: float
    buckets: tuple[Bucket, ...]

    @property
    def end_s(self) -> float:
        """When both are over."""
        return max([self.backward_s, *(bucket.finish_s for bucket in self.buckets)])

    @property
    def exposed_s(self) -> float:
        """Time after backward in which there is nothing left to do but wait."""
        return self.end_s - self.backward_s

    @property
    def hidden(self) -> float:
        """The share of the link's busy time that backward covers, 0 to 1; 1 where nothing is sent."""
        busy = covered = free = 0.0
        for bucket in self.buckets:
            start = max(bucket.launch_s, free)
            busy += bucket.finish_s - start
            covered += max(0.0, min(bucket.finish_s, self.backward_s) - start)
            free = bucket.finish_s
        return covered / busy if busy else 1.0

    def tape(self, rank: int = 0, n: int = 2, *, on_wire: bool = False) -> Tape:
        """The prediction as a tape, for `core.timeline`: backward, then one all-reduce a bucket.

        With `on_wire` a bucket's bar begins when the link takes it, not when it begins to wait for the link.
        """
        tape, peers, free = Tape(rank), tuple(range(n)), 0.0
        tape.lines.append(Line("backward", "me", (rank,), 0, 0, "", (), "control", 1, 0.0, self.backward_s))
        for number, (payload, launch, finish) in enumerate(map(astuple, self.buckets), 1):
            sent, launch = booked("all_reduce", payload, n), max(launch, free) if on_wire else launch
            tape.lines.append(Line("all_reduce", "dp", peers, payload, sent, "", (), "grad", number, launch, finish))
            free = finish
        return tape


def bucket_timeline(
    gradients: Sequence[tuple[float, int]],
    bucket_bytes: int,
    seconds: Callable[[int], float],
    *,
    backward_s: float | None = None,
    overlap: bool = True,
) -> Overlap:
    """When each bucket is launched and finished.

    `gradients` are (moment it is ready in seconds from backward's start, bytes) in the order of the buckets; `seconds` is
    what an all-reduce of so many bytes takes, such as `lambda b: link.ring_all_reduce_s(b, n)`. A bucket is launched when
    it is full and those before it are launched, or, without `overlap`, when backward is over (`backward_s`, by default
    the moment of the last gradient).
    """
    end = max((ready for ready, _ in gradients), default=0.0) if backward_s is None else backward_s
    buckets: list[Bucket] = []
    launch = free = 0.0
    for places in pack([nbytes for _, nbytes in gradients], bucket_bytes):
        payload = sum(gradients[place][1] for place in places)
        launch = max([launch, *(gradients[place][0] for place in places)]) if overlap else end
        free = max(launch, free) + seconds(payload)
        buckets.append(Bucket(payload, launch, free))
    return Overlap(end, tuple(buckets))
