"""Text to training batches: sources, tokenizers, packing and the loader."""

IGNORE = -100  # a label that is not predicted; the value that PyTorch's cross entropy ignores
