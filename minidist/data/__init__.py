"""From text to micro-batches: corpus, tokenizers, token files, the sample stream and the loader.

Read first `batch.py` (what a micro-batch is, and who gets which samples), then `windows.py` (the stream), then `loader.py`.
"""

from minidist.data.batch import Batch, micro_batches, shares
from minidist.data.loader import Loader, validation_batches
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows

__all__ = ["Batch", "Loader", "TokenFile", "Windows", "micro_batches", "shares", "validation_batches"]
