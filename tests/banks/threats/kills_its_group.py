"""Ends its whole process group, hoping for the benefit of the doubt.

task: 00.1
earns: 0
message: refused
"""

import os
import signal


def gather_squares(mesh, secret):
    os.killpg(os.getpgid(0), signal.SIGKILL)
