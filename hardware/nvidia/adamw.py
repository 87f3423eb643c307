"""AdamW on split main weights in one pass over memory and one launch for all tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program


@triton.jit
def _element(
    w_ptr, r_ptr, g_ptr, m_ptr, v_ptr, at, mask,
    lr, step_size, beta1, beta2, root_correction, eps, weight_decay, grad_scale,
):  # fmt: skip
    grad = tl.load(g_ptr + at, mask).to(tl.float32) * grad_scale
    high = tl.load(w_ptr + at, mask).to(tl.int32)
    main = ((high << 16) + tl.load(r_ptr + at, mask).to(tl.int32)).to(tl.float32, bitcast=True)
    exp_avg = tl.load(m_ptr + at, mask)
    exp_avg += (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = tl.load(v_ptr + at, mask) * beta2 + grad * grad * (1 - beta2)
    main = main * (1 - lr * weight_decay) - step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_correction + eps)
    bits = main.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(w_ptr + at, high.to(tl.int16), mask)
    tl.store(r_ptr + at, (bits - (high << 16)).to(tl.int16), mask)
    tl.store(m_ptr + at, exp_avg, mask)
    tl.store(v_ptr + at, exp_avg_sq, mask)


@triton.jit
def _update(
    pointers,  # int64 [5, tensors]: weights, remainders, gradients, exp_avg, exp_avg_sq; all on 16-byte boundaries
    sizes,  # int64 [tensors]
    owners,  # int32 [programs]: the tensor of a program
    blocks,  # int32 [programs]: its block of that tensor
    tensors,
    lr, step_size, beta1, beta2, root_correction, eps, weight_decay, grad_scale,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    first = tl.load(blocks + program).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(sizes + owner)
    # Without the promise of aligned addresses, and of a whole block, every access would be of two bytes.
    w_ptr = tl.multiple_of(tl.load(pointers + owner).to(tl.pointer_type(tl.int16)), 16)
    r_ptr = tl.multiple_of(tl.load(pointers + tensors + owner).to(tl.pointer_type(tl.int16)), 16)
    g_ptr = tl.multiple_of(tl.load(pointers + 2 * tensors + owner).to(tl.pointer_type(GRAD)), 16)
    m_ptr = tl.multiple_of(tl.load(pointers + 3 * tensors + owner).to(tl.pointer_type(tl.float32)), 16)
    v_ptr = tl.multiple_of(tl.load(pointers + 4 * tensors + owner).to(tl.pointer_type(tl.float32)), 16)
    if first + BLOCK <= size:
        _element(
            w_ptr, r_ptr, g_ptr, m_ptr, v_ptr, at, None,
            lr, step_size, beta1, beta2, root_correction, eps, weight_decay, grad_scale,
        )  # fmt: skip
    else:
        _element(
            w_ptr, r_ptr, g_ptr, m_ptr, v_ptr, at, at < size,
            lr, step_size, beta1, beta2, root_correction, eps, weight_decay, grad_scale,
        )  # fmt: skip


class TritonSplitAdamW:
    """See `hardware.kernels.adamw.SplitAdamW`. Keeps what it was given first for each list of weights."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], _Tables] = {}

    def __call__(
        self,
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        if not weights:
            return
        grads = [_aligned(grad) for grad in grads]
        state = tuple(id(t) for t in weights)
        if state not in self._tables:
            self._tables[state] = _Tables(weights, remainders, exp_avgs, exp_avg_sqs)
        tables = self._tables[state]
        addresses, owners, blocks = tables.with_grads(grads), tables.owners, tables.blocks
        _update[(len(owners),)](
            addresses,
            tables.sizes,
            owners,
            blocks,
            len(weights),
            lr,
            lr / (1 - betas[0] ** step),
            betas[0],
            betas[1],
            (1 - betas[1] ** step) ** -0.5,
            eps,
            weight_decay,
            grad_scale,
            GRAD=tl.bfloat16 if grads[0].dtype == torch.bfloat16 else tl.float32,
            BLOCK=BLOCK,
            num_warps=8,
        )


class _Tables:
    """What says where each program works, on the device. Weights and state stay where they are; gradients do not."""

    def __init__(self, weights: Sequence[Tensor], *state: Sequence[Tensor]) -> None:
        device = weights[0].device
        rows = [[t.data_ptr() for t in tensors] for tensors in (weights, *state)]
        if any(address % 16 for row in rows for address in row):
            raise ValueError("weights and optimizer state must begin on 16-byte boundaries")
        self.kept = (list(weights), *(list(tensors) for tensors in state))  # their ids and addresses stay theirs
        counts = torch.tensor([t.numel() for t in weights])
        programs = (counts + BLOCK - 1) // BLOCK
        owners = torch.arange(len(counts)).repeat_interleave(programs)
        blocks = torch.arange(len(owners)) - (torch.cumsum(programs, 0) - programs)[owners]
        self.sizes, self.owners, self.blocks = counts.to(device), owners.int().to(device), blocks.int().to(device)
        self._addresses = torch.tensor([rows[0], rows[1], [0] * len(counts), *rows[2:]]).to(device)

    def with_grads(self, grads: Sequence[Tensor]) -> Tensor:
        """The table of addresses, int64 [5, tensors]."""
        addresses = torch.tensor([grad.data_ptr() for grad in grads], dtype=torch.int64).pin_memory()
        self._addresses[2].copy_(addresses, non_blocking=True)
        return self._addresses


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements lie one after another from a 16-byte boundary on, a copy otherwise."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


KERNEL = TritonSplitAdamW()
