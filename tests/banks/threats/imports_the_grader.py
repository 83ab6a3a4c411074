"""Imports its own grader and asks it.

task: 01.2
earns: 0
message: refused
"""

import importlib

theirs = importlib.import_module("minidist.course.tasks." + "01_gpu")


def bound(op, machine):
    return theirs._bound(op, machine)


def seconds(op, machine):
    return max(theirs._times(op, machine).values())


def share(op, machine):
    times = theirs._times(op, machine)
    return times["compute"] / max(times.values())
