"""The nursery: a process that has imported torch and run none of it, and forks a fresh sandbox for each attempt.

The imports of an attempt (torch here, torch again for its ranks) cost four seconds of a core; forked, an attempt has them
for nothing. This file is the judge's side: hand over a job, wait, end whatever is left, read the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import minidist


class Nursery:
    """One attempt at a time, each in a process of its own. A context manager; nothing starts before the first `run`."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._said: queue.Queue = queue.Queue()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, job: dict, limit_s: float) -> dict:
        """Run a job of `grading`; {"cases": [...], "note": str}. A result that never came is a note that says why."""
        with tempfile.TemporaryDirectory(prefix="minidist-grade-") as scratch:
            judge, empty = Path(scratch, "judge"), Path(scratch, "empty")
            judge.mkdir()
            empty.mkdir()
            result = judge / f"{random.SystemRandom().getrandbits(64):x}.json"
            output, order = judge / "output", judge / "job"
            order.write_text(json.dumps({**job, "result": str(result)}))
            self._start()
            self._tell({"job": str(order), "folder": str(empty), "output": str(output)})
            status = self._wait(limit_s)
            try:
                return json.loads(result.read_bytes())
            except (OSError, ValueError, RecursionError):
                why = "ran past its time" if status is None else f"ended early (exit status {status})"
                text = output.read_text(errors="replace") if output.exists() else ""
                tail = [line for line in text.split("\n") if line.strip()][-4:]
                note = [f"The notebook's cells {why}, before the grader had an answer.", *tail]
                return {"cases": [], "note": "\n".join(note)}

    def close(self) -> None:
        """End the nursery, and with it whatever it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            process.stdout.close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        root = str(Path(minidist.__file__).parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._said = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minidist.course.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "MINIDIST_GRADING": "1", "MINIDIST_STRICT": "", "PYTHONPATH": path},
        )
        threading.Thread(target=self._listen, args=(self._process.stdout, self._said), daemon=True).start()

    @staticmethod
    def _listen(stream, said: queue.Queue) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in stream:
                said.put(int(line))
        said.put(None)

    def _tell(self, job: dict) -> None:
        with contextlib.suppress(OSError):  # gone: the wait below hears of it
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def _wait(self, limit_s: float) -> int | None:
        """The sandbox's exit status; None if it ran past the limit and was ended."""
        pid = self._said.get()
        if pid is None:
            return self._process.wait()
        try:
            status = self._said.get(timeout=limit_s)
        except queue.Empty:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._said.get()
            return None
        return self._process.wait() if status is None else status
