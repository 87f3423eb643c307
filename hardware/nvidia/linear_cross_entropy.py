"""Loss and gradients from a few thousand tokens' logits at a time, by Liger-Kernel."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from hardware.kernels.linear_cross_entropy import IGNORE

# Each chunk reads and writes the gradient of the whole matrix, so few large ones; 16 times Liger's default is 4096
# tokens of Qwen3-1.7B, 1.2 GB of logits.
CHUNK = 16


def linear_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """See `hardware.kernels.linear_cross_entropy.LinearCrossEntropy`. The matrix's gradient is summed in fp32."""
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it lists the backends that are not installed
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    off = (0.0, 0.0, "sum", None, False, torch.float32, False, False, False, None, None, CHUNK)
    return Fused.apply(hidden_TH, weight_VH, labels_T, None, None, IGNORE, *off)[0]
