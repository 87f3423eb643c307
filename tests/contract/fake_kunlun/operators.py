"""Operators of XPyTorch, computed by formulas in float64, and what a card would not take."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("custom_ops", "DEF")


def define_swiglu() -> None:
    """Source: Baidu's public Megatron plugins, by their calls: (input, axis, gate first, out=) and dx= (high)."""
    LIBRARY.define("swiglu_forward(Tensor x, int axis, bool turn, *, Tensor(a!) out) -> ()")
    LIBRARY.define("swiglu_backward(Tensor x, Tensor dy, int axis, bool turn, *, Tensor(a!) dx) -> ()")
    LIBRARY.impl("swiglu_forward", forward, "CompositeExplicitAutograd")
    LIBRARY.impl("swiglu_backward", backward, "CompositeExplicitAutograd")


def halves(x, axis, turn):
    """Source: the same calls, where megatron-core holds the gate first and `turn` is true (medium)."""
    assert x.is_contiguous() and x.numel(), "kernels read raw storage, and empty inputs are kept from them"
    first, second = x.double().chunk(2, axis)
    return (first, second) if turn else (second, first)


def forward(x, axis, turn, *, out):
    """Source: Shazeer, arXiv 2002.05202 (certain)."""
    gate, up = halves(x, axis, turn)
    out.copy_(gate / (1 + (-gate).exp()) * up)


def backward(x, dy, axis, turn, *, dx):
    """Source: the derivative of the above (certain)."""
    gate, up = halves(x, axis, turn)
    sigmoid = 1 / (1 + (-gate).exp())
    of_gate, of_up = dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid
    dx.copy_(torch.cat([of_gate, of_up] if turn else [of_up, of_gate], axis))


def refuse_means() -> None:
    """Source: a public Megatron plugin for Kunlun, where a mean of losses is a sum and a division (medium)."""
    import torch.distributed as dist

    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(dist, name, _summing(getattr(dist, name)))


def _summing(collective):
    """Source: see `refuse_means`."""

    def call(*args, **kwargs):
        if any(isinstance(arg, type(dist_mean())) and arg == dist_mean() for arg in (*args, kwargs.get("op"))):
            raise RuntimeError("BKCL: reduce op AVG is not supported")
        return collective(*args, **kwargs)

    return call


def dist_mean():
    """Source: torch.distributed's name of the operation (certain)."""
    return torch.distributed.ReduceOp.AVG


def refuse_asynchronous_copies() -> None:
    """Source: a public Megatron plugin for Kunlun, which makes the copies of checkpoints to the host wait (medium)."""
    copy = torch.Tensor.copy_

    def waiting(self, source, non_blocking=False):
        if non_blocking:
            raise RuntimeError("the copy is not finished when it is read")
        return copy(self, source)

    torch.Tensor.copy_ = waiting
