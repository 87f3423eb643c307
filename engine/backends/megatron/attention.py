"""The core attention of every Megatron model here: the hardware plugin's kernels behind megatron-core's interface.

Tokens of all rows of a micro-batch come flattened into one row [T, 1, ...]: packed documents then differ from equal
rows only in the kernel that is called, and sequence parallelism may pad the end without touching any document.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from engine.backends.megatron import context_parallel
from hardware.kernels.attention import Attention


@dataclass(frozen=True)
class Documents:
    """Where the documents lie in the flattened tokens. Passed where megatron-core expects its PackedSeqParams.

    megatron-core looks at `qkv_format` only: anything but "thd" leaves the tensors [T, 1, heads, width] and the rotary
    angles, which are given by token, as they are.
    """

    rows: int
    length: int  # tokens of each row
    cu_seqlens: Tensor
    max_seqlen: int
    dense: bool  # every row is one document
    chunks: tuple[context_parallel.Chunk, ...] = ()  # of this rank, under context parallelism
    rows_t: Tensor | None = None  # int64, the row of each of this rank's tokens; negative for padding
    experts: dict[int, Tensor] = field(default_factory=dict)  # by layer, int64 [t, k]: decisions that are given
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, the keys that its indexer chose
    qkv_format: str = "rows"

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class CoreAttention(MegatronModule):
    """Causal attention inside each document."""

    def __init__(
        self,
        config: TransformerConfig,
        kernels: Attention,
        softmax_scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        """`window`: how many tokens a query sees, its own among them. `sinks`: each head has one, see the kernels."""
        super().__init__(config=config)
        self._kernels = kernels
        self._scale = softmax_scale
        self._window = window
        self.sinks: Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)
            self.kernels = {"attention with sinks": getattr(kernels, "sinks_by", "the hardware's own")}

    def _masks(self) -> dict[str, Any]:
        """What kernels without windows and sinks need not know."""
        window = {} if self._window is None else {"window": self._window}
        return window if self.sinks is None else {**window, "sinks": self.sinks}

    def forward(
        self,
        q_T1HD: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Documents | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, 1, H * D]. Tokens beyond the documents (padding) get zeros.

        Under context parallelism T are this rank's tokens, and padding is a document of its own.
        """
        documents, masks = packed_seq_params, self._masks()
        if documents.chunks:
            group = parallel_state.get_context_parallel_group()
            qkv = (x[:, 0] for x in (q_T1HD, k_T1KD, v_T1KD))
            tails = partial(self._kernels.tails, **masks) if masks else self._kernels.tails
            out = context_parallel.attend(*qkv, documents.chunks, group, tails, self._scale)
            return out.flatten(1).unsqueeze(1)
        q, k, v = (x[: documents.tokens, 0] for x in (q_T1HD, k_T1KD, v_T1KD))
        if documents.dense:
            shape = (documents.rows, documents.length)
            rows = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            out = self._kernels.causal(*rows, self._scale, **masks)
            out_TE = out.transpose(1, 2).reshape(documents.tokens, -1)
        else:
            out = self._kernels.varlen(q, k, v, documents.cu_seqlens, documents.max_seqlen, self._scale, **masks)
            out_TE = out.reshape(documents.tokens, -1)
        padding = q_T1HD.shape[0] - documents.tokens
        return (pad(out_TE, (0, 0, 0, padding)) if padding else out_TE).unsqueeze(1)
