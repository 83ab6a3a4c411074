"""Runs the solution from disk.

task: 01.2
earns: 0
message: refused
"""

import os

import minidist

theirs = {}
home = os.path.dirname(minidist.__path__[0])
exec(open(os.path.join(home, "solutions", "src", "01_gpu.py")).read(), theirs)


def bound(op, machine):
    return theirs["bound"](op, machine)


def seconds(op, machine):
    return theirs["seconds"](op, machine)


def share(op, machine):
    return theirs["share"](op, machine)
