"""Sends a pickle that would run code straight down the rank's own connection.

task: 00.1
earns: 0
message: died
"""

import sys


class Payload:
    def __reduce__(self):
        return exec, ("import minidist.course.sandbox as s; s.run_case = lambda *a: 1 / 0",)


def gather_squares(mesh, secret):
    frame = sys._getframe()
    while frame:
        rank = frame.f_locals.get("self")
        if hasattr(rank, "connection"):
            rank.connection.send(Payload())
            break
        frame = frame.f_back
