"""Memory that is freed stays with the process: filled again, it costs no page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from minidist.core.allocator import keep_freed

if sys.argv[1] == "kept" and not keep_freed():
    print("unheard")
    sys.exit()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    before = faults()
    blocks = [torch.ones(2**18) for _ in range(160)]
    del blocks
print(faults() - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "unheard":
        pytest.skip("the allocator is not glibc's")
    return int(done.stdout)


def test_what_is_freed_is_kept():
    pages = 160 * 2**20 // 4096
    assert faults("kept") < pages / 100
    assert faults("as it is") > pages / 100, "this system keeps memory by itself: the test shows nothing here"
