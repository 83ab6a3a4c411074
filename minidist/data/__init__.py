"""From text to micro-batches: corpus, tokenizers, token files, the sample stream and the loader."""
