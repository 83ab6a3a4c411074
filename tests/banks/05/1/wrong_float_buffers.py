"""Makes its buffers with torch.zeros: float32, whatever x is.

message: dtype
"""

import torch

from minidist.core import comm


def all_gather(mesh, x):
    n, me = mesh.world_size, mesh.rank
    whole = torch.zeros(n, *x.shape)
    whole[me] = x
    for k in range(1, n):
        came = torch.empty_like(x)
        comm.exchange([("send", x, (me + k) % n), ("recv", came, (me - k) % n)], mesh.world)
        whole[(me - k) % n] = came
    return whole.flatten(0, 1)
