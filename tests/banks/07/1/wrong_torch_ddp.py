"""torch's own.

message: refused
"""

from torch.nn.parallel import DistributedDataParallel


class DDP:
    def __init__(self, mesh, model, bucket_bytes):
        self.ddp = DistributedDataParallel(model)

    def __call__(self, *inputs):
        return self.ddp(*inputs)

    def finish(self):
        pass
