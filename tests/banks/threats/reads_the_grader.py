"""Reads its own grader from disk and runs it.

task: 01.2
earns: 0
message: refused
"""

import types

import minidist

theirs = types.ModuleType("theirs")
exec(open(minidist.__path__[0] + "/course/tasks/01_gpu.py").read(), theirs.__dict__)


def bound(op, machine):
    return theirs._bound(op, machine)


def seconds(op, machine):
    return max(theirs._times(op, machine).values())


def share(op, machine):
    times = theirs._times(op, machine)
    return times["compute"] / max(times.values())
