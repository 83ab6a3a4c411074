"""finish() leaves counts and launches as they are.

message: later-steps
"""

from contextlib import contextmanager

import torch

from minidist.core import comm


class DDP:
    def __init__(self, mesh, model, bucket_bytes):
        self.group, self.model, self.quiet = mesh.world, model, False
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast(tensor.detach(), self.group, src=0, tag="weight")
        self.buckets, room = [], -1
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            size = p.numel() * p.element_size()
            if not self.buckets or size > room:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(p)
            room -= size
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))
        self._begin()

    def __call__(self, *inputs):
        return self.model(*inputs)

    @contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def finish(self):
        while len(self.launched) < len(self.buckets):
            self._launch()
        for bucket, (flat, work) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p).clone()
        for buffer in self.model.buffers():
            comm.broadcast(buffer, self.group, src=0, tag="weight")

    def _begin(self):
        self.missing, self.launched = [len(bucket) for bucket in self.buckets], []

    def _arrived(self, number):
        if self.quiet:
            return
        self.missing[number] -= 1
        while len(self.launched) < len(self.buckets) and self.missing[len(self.launched)] == 0:
            self._launch()

    def _launch(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[len(self.launched)]]
        flat = torch.cat([grad.flatten() for grad in grads])
        self.launched.append((flat, comm.all_reduce(flat, self.group, tag="grad", async_op=True)))
