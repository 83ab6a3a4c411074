"""A hook on the tensor instead: it sees the gradient before it is in p.grad, and replaces it."""

import torch

from minidist.core import comm


class DDP:
    def __init__(self, mesh, model, bucket_bytes):
        self.mesh, self.model, self.works = mesh, model, []
        for p in model.parameters():
            comm.broadcast(p.detach(), mesh.world, src=0, tag="weight")
        for p in model.parameters():
            p.register_hook(self.arrived)

    def __call__(self, *inputs):
        return self.model(*inputs)

    def arrived(self, grad):
        return comm.all_reduce(grad.clone(), self.mesh.world, tag="grad")

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()
