"""The tape against the kernel's own count: bytes that really crossed the loopback interface, in a network of our own.

gloo's all-reduce, all-gather and broadcast move what is booked, within 5 % (headers and acknowledgements); its reduce-scatter
really moves an all-reduce's bytes, twice what is booked. That is what `sent` means: booked, not seen.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

ALONE = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare")

PROGRAM = """
import fcntl, json, socket, struct, time

with socket.socket() as s:  # a new network namespace has its loopback down
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING

import torch
from minidist import ranks
from minidist.core import comm


def lo():
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])  # bytes transmitted


def program(mesh, op):
    x = torch.ones(1 << 21)  # 8 MiB
    world = mesh.world
    comm.barrier(world)
    time.sleep(0.05)
    before = lo()
    comm.barrier(world)
    {
        "all_reduce": lambda: comm.all_reduce(x, world),
        "all_gather": lambda: comm.all_gather(x[: x.numel() // 4], world),
        "broadcast": lambda: comm.broadcast(x, world),
        "reduce_scatter": lambda: comm.reduce_scatter(x, world),
    }[op]()
    comm.barrier(world)
    time.sleep(0.05)
    return lo() - before, mesh.tape.sent(op=op)


found = {}
for op in ("all_reduce", "all_gather", "broadcast", "reduce_scatter"):
    results = ranks.run(program, 4, op)
    found[op] = results[0][0] / sum(sent for _, sent in results)
ranks.stop()
print(json.dumps(found))
"""


@pytest.mark.skipif(not ALONE, reason="needs root on Linux, for a network namespace where nobody else talks")
def test_booked_bytes_are_the_bytes_on_the_wire():
    command = ["unshare", "--net", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ratio = json.loads(done.stdout.splitlines()[-1])
    for op in ("all_reduce", "all_gather", "broadcast"):
        assert ratio[op] == pytest.approx(1.0, abs=0.05), op
    assert ratio["reduce_scatter"] == pytest.approx(2.0, abs=0.1)
