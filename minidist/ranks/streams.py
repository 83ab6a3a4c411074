"""A rank's own sys.stdout and sys.stderr: whole lines travel to the parent, so ranks never interleave in mid-line."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable

Send = Callable[[str, str], None]  # (stream name, text of whole lines)


class RankStream(io.TextIOBase):
    """A text stream that hands on complete lines. `rest` hands on what is left at the end of a run."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, name: str, fd: int, send: Send):
        self.name, self._fd, self._send = name, fd, send
        self._open_line, self._lock = "", threading.RLock()

    def write(self, text: str) -> int:
        """Take `text`; a carriage return starts its line anew, so of a progress bar the last state stays."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            whole, newline, self._open_line = (self._open_line + text).rpartition("\n")
            if newline:
                self._send(self.name, "".join(_last_state(line) + "\n" for line in whole.split("\n")))
            elif "\r" in self._open_line:
                self._open_line = _last_state(self._open_line)
        return len(text)

    def rest(self) -> None:
        """Hand on a last line that has no newline."""
        with self._lock:
            if self._open_line:
                self.write("\n")

    def writable(self) -> bool:
        """True: this is what print() asks."""
        return True

    def fileno(self) -> int:
        """The rank's log file, for what writes below Python: a subprocess, a C++ library."""
        return self._fd


def _last_state(line: str) -> str:
    line = line.removesuffix("\r")
    return line.rpartition("\r")[2]


class LogTail:
    """What was written to the rank's log file below Python since the last look."""

    def __init__(self, fd: int):
        self._fd, self._seen = fd, os.fstat(fd).st_size

    def new(self) -> str:
        """Text added since the last call; "" as a rule, at the price of one fstat."""
        size = os.fstat(self._fd).st_size
        if size == self._seen:
            return ""
        data = os.pread(self._fd, min(size - self._seen, 1 << 16), self._seen)
        self._seen = size
        return data.decode(errors="replace")
