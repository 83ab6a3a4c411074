"""Loads its own grader from the cache of compiled files.

task: 01.2
earns: 0
message: refused
"""

import importlib.machinery
import importlib.util
import os

import minidist

path = importlib.util.cache_from_source(os.path.join(minidist.__path__[0], "course", "tasks", "01_gpu.py"))
theirs = importlib.machinery.SourcelessFileLoader("theirs", path).load_module()


def bound(op, machine):
    return theirs._bound(op, machine)


def seconds(op, machine):
    return max(theirs._times(op, machine).values())


def share(op, machine):
    times = theirs._times(op, machine)
    return times["compute"] / max(times.values())
