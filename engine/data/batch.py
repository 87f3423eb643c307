"""One micro-batch, as every data source makes it and both backends read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.data import IGNORE


@dataclass
class Batch:
    """Packed rows of documents. B rows of S tokens.

    A token attends to earlier tokens of its own document only. `cu_seqlens` gives the documents' boundaries in the B*S
    flattened tokens: every row starts a new document, and padding at a row's end is a document without labels.
    """

    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64; already shifted: the token to predict at this position, or IGNORE
    positions_BS: Tensor  # int64; restart at 0 with every document
    cu_seqlens: Tensor  # int32 [documents + 1], 0 first and B*S last
    max_seqlen: int
    sample_ids: list[int] = field(default_factory=list)  # global row numbers, one for each row
    sources: list[int] = field(default_factory=list)  # number of each row's source in the mixture
    experts: dict[int, Tensor] = field(default_factory=dict)  # by layer, int64 [B, S, k]: router decisions to replay

    @property
    def num_tokens(self) -> int:
        """Supervised tokens."""
        return int((self.labels_BS != IGNORE).sum())

    @property
    def dense(self) -> bool:
        """Every row is one document, so that plain causal attention serves."""
        return len(self.cu_seqlens) == self.tokens_BS.shape[0] + 1

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; copies do not block where the memory is pinned."""
        tensors = (
            t.to(device, non_blocking=True)
            for t in (self.tokens_BS, self.labels_BS, self.positions_BS, self.cu_seqlens)
        )
        experts = {layer: chosen.to(device, non_blocking=True) for layer, chosen in self.experts.items()}
        return Batch(*tensors, self.max_seqlen, self.sample_ids, self.sources, experts)


def sample_rows(batch: Batch) -> Tensor:
    """The number of each row within the batch, negative for rows that only fill it up."""
    ids = batch.sample_ids or [-1] * batch.tokens_BS.shape[0]
    return torch.tensor([row if sample >= 0 else -1 for row, sample in enumerate(ids)])


def token_counts(batches: Sequence[Batch]) -> tuple[int, int]:
    """Supervised tokens of some micro-batches, and real ones: those of rows that do not only fill a batch up."""
    real = sum(int((sample_rows(b) >= 0).sum()) * b.tokens_BS.shape[1] for b in batches)
    return sum(b.num_tokens for b in batches), real


def rows_to_batch(tokens_BS: Tensor, labels_BS: Tensor, starts_BS: Tensor, sample_ids: list[int]) -> Batch:
    """A batch from rows and their document starts (bool [B, S]; the first column counts as a start in any case)."""
    rows, length = tokens_BS.shape
    starts_BS = starts_BS.clone()
    starts_BS[:, 0] = True
    first = starts_BS.reshape(-1).nonzero().squeeze(-1)
    cu_seqlens = torch.cat([first, torch.tensor([rows * length])]).to(torch.int32)
    lengths = cu_seqlens.diff()
    positions = torch.arange(rows * length) - first.repeat_interleave(lengths.long())
    return Batch(tokens_BS, labels_BS, positions.view(rows, length), cu_seqlens, int(lengths.max()), sample_ids)
