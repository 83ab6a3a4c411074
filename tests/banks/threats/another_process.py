"""Starts a process that nobody guards.

task: 01.2
earns: 0
message: refused
"""

import subprocess
import sys

print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout)


def bound(op, machine):
    return "memory"
