"""Sets every variable it has heard of.

task: 00.1
earns: 0
"""

import os

for name in ("MINIDIST_GRADING", "MINIDIST_STRICT", "MINIDIST_HOME", "MINIDIST_COURSE", "PYTHONPATH", "LD_PRELOAD", "PYTHONSTARTUP"):
    os.environ[name] = ""
os.environ["MINIDIST_STRICT"] = "unsolved"


def gather_squares(mesh, secret):
    return None
