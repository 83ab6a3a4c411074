"""Calls C, where no hook listens.

task: 00.1
earns: 0
message: refused
"""

import ctypes


def gather_squares(mesh, secret):
    return ctypes.CDLL(None).getpid()
