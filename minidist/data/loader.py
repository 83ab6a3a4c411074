"""From the sample stream to the micro-batches of each step, read ahead by one thread; and the validation batches."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from minidist.data.batch import Batch, split
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows
from minidist.model.loss import IGNORE


class Loader:
    """Iterates for ever over optimizer steps; each is this rank's list of micro-batches, equally many on every rank.

    `position` is the number of samples (of the whole job) in the steps handed out so far: store it, and a new Loader
    with it, at any dp, goes on with the next step. `prefetch` steps are read ahead by a thread (0: none, read on demand).
    An error in the thread is raised by `next`. Close it (or use it in a `with`); a forgotten one ends its thread when it
    is collected.
    """

    def __init__(
        self,
        windows: Windows,
        dp_rank: int,
        dp: int,
        global_batch: int,
        micro_batch: int,
        position: int = 0,
        prefetch: int = 2,
    ):
        self.global_batch, self.position = global_batch, position
        split(position, dp_rank, dp, global_batch, micro_batch)  # an impossible batch is refused here, not in the thread
        self._steps = _steps(windows, dp_rank, dp, global_batch, micro_batch, position)
        self._queue: queue.Queue | None = queue.Queue(prefetch) if prefetch else None
        self._stop = threading.Event()
        self._end: weakref.finalize | None = None  # ends the thread, once there is one

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._stop.is_set():
            raise ValueError("the loader is closed; make a new one with position=loader.position")
        if self._queue is None:
            item = next(self._steps)
        else:
            if self._end is None:  # first use: a Loader that is only made costs nothing
                arguments = (self._steps, self._queue, self._stop)  # not self: a forgotten Loader must be collectable
                thread = threading.Thread(target=_produce, args=arguments, name="minidist-loader", daemon=True)
                thread.start()
                self._end = weakref.finalize(self, _end, self._stop, thread)
            item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        self.position += self.global_batch
        return item

    def close(self) -> None:
        """Stop reading ahead and wait for the thread to end. Closing twice is fine."""
        self._stop.set()
        if self._end is not None:
            self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _steps(windows: Windows, dp_rank: int, dp: int, global_batch: int, micro_batch: int, position: int) -> Iterator:
    """The steps from `position` on."""
    while True:
        places = split(position, dp_rank, dp, global_batch, micro_batch)
        ids = windows.ids(np.arange(places[0].start, places[-1].stop))
        edges = np.cumsum([len(place) for place in places])[:-1]
        yield [_read(windows, part) for part in np.split(ids, edges)]
        position += global_batch


def _read(windows: Windows, ids: np.ndarray) -> Batch:
    """The windows `ids` as a micro-batch; an empty one of a single row for no id, the cheapest way to take part."""
    if not len(ids):
        return Batch.empty(1, windows.seq_len)
    return Batch.of(windows.read(ids), ids, windows.tokens.separator)


def _produce(steps: Iterator, out: queue.Queue, stop: threading.Event) -> None:
    """The thread: fill the queue until told to stop. Puts wait in short turns, so that `stop` is noticed."""
    while not stop.is_set():
        try:
            item = next(steps)
        except Exception as error:
            item = error
        while not stop.is_set():
            try:
                out.put(item, timeout=0.05)
                break
            except queue.Full:
                continue
        if isinstance(item, Exception):
            return


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Tell the thread to stop and wait for it; also when a Loader is collected, and before the interpreter ends."""
    stop.set()
    thread.join()


def validation_batches(
    tokens: TokenFile, seq_len: int, micro_batch: int, dp_rank: int = 0, dp: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """This rank's part of the held-out windows, in micro-batches, equally many on every rank.

    Over all ranks every window comes exactly once (C10): batch i of the file goes to rank i mod dp, and empty batches
    fill up. The last window may be short; targets past the end are IGNORE. So every token but the first is a target
    once, and sum of losses / sum of valid targets does not depend on dp or micro_batch. `limit`: only that many windows,
    spread evenly over the file, the same ones at any layout.
    """
    count = -(-(len(tokens) - 1) // seq_len)
    if count < 1:
        raise ValueError(f"{tokens.path}: {len(tokens)} held-out tokens are too few to predict one; use more text")
    ids = np.arange(count) if limit is None or limit >= count else np.arange(limit) * count // limit
    rounds = -(-len(ids) // (micro_batch * dp))
    starts = [(turn * dp + dp_rank) * micro_batch for turn in range(rounds)]
    return (_held_out(tokens, seq_len, ids[a : a + micro_batch]) for a in starts)


def _held_out(tokens: TokenFile, seq_len: int, ids: np.ndarray) -> Batch:
    """Windows `ids` of the file in its own order, the last of them filled up; an empty batch for no id."""
    if not len(ids):
        return Batch.empty(1, seq_len)
    places = ids[:, None] * seq_len + np.arange(seq_len + 1)  # (B,S+1)
    inside = places < len(tokens)
    batch = Batch.of(tokens.array[np.where(inside, places, 0)], ids, tokens.separator)
    batch.targets[~np.ascontiguousarray(inside[:, 1:])] = IGNORE
    return batch
