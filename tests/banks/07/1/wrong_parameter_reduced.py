"""Reduces the weights in place of the gradients.

message: detach
"""

import torch

from minidist.core import comm


class DDP:
    def __init__(self, mesh, model, bucket_bytes):
        self.mesh, self.model, self.works = mesh, model, []
        for p in model.parameters():
            comm.broadcast(p.detach(), mesh.world, src=0, tag="weight")
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.arrived)

    def __call__(self, *inputs):
        return self.model(*inputs)

    def arrived(self, p):
        self.works.append(comm.all_reduce(p, self.mesh.world, tag="grad", async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()
