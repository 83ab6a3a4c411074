"""Runs an honest entry of its own bank.

task: 01.2
earns: 0
message: refused
"""

import os
import pathlib

import minidist

theirs = {}
home = pathlib.Path(minidist.__path__[0]).parent
exec((home / "tests/../tests/banks/01/2/honest_three_times.py").read_text(), theirs)


def bound(op, machine):
    return theirs["bound"](op, machine)


def seconds(op, machine):
    return theirs["seconds"](op, machine)


def share(op, machine):
    return theirs["share"](op, machine)
