"""Text to training batches: sources, tokenizers, packing and the loader."""

IGNORE = -100  # a label that is not predicted; the value that PyTorch's cross entropy ignores
SMALLEST_BPE = 256 + 1  # tokens of a byte-level BPE: every byte, and the end of a text
