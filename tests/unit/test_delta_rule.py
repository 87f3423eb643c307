"""The gated delta rule: chunks against its definition, and against transformers' function for each document alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, logsigmoid, silu

from hardware.kernels.delta_rule import CHUNK, causal_convolution, gated_delta_rule, recurrent_delta_rule

LENGTHS = [
    (1,),
    (7,),
    (1, 9, 6, 8),
    (5, 5, 5),  # rows
    (CHUNK, CHUNK + 1, 1, 2 * CHUNK + 3),
    (0, 3, 0, 4),
    (),
]


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(lengths: tuple[int, ...], keys: int = 2, values: int = 6, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, g, beta with strong and weak decay, in double precision."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(tokens, keys, 5), draw(tokens, keys, 5), draw(tokens, values, 3)
    g, beta = 4 * logsigmoid(3 * draw(tokens, values)), draw(tokens, values).sigmoid()
    return tuple(x.requires_grad_() for x in (q, k, v, g, beta))


def with_gradients(function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output, and the gradients of a sum of it with unequal weights."""
    out = function(*tensors)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True)


def assert_same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine is theirs is None or (mine - theirs).norm() <= bound * theirs.norm().clamp_min(1e-9)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunks_are_the_recurrence(lengths: tuple[int, ...]) -> None:
    tensors, cu = inputs(lengths), bounds(lengths)
    chunked, recurrent = (
        with_gradients(lambda *x, rule=rule: rule(*x, cu), tensors) for rule in (gated_delta_rule, recurrent_delta_rule)
    )
    assert chunked[0].shape == (sum(lengths), 6, 3)
    assert_same(chunked, recurrent, 1e-11)


@pytest.mark.parametrize("lengths", [(1, 9, 6, 8), (CHUNK + 1, 2 * CHUNK + 3, 5)], ids=str)
def test_documents_are_transformers_alone(lengths: tuple[int, ...]) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    cu = bounds(lengths)

    def alone(*tensors: Tensor) -> Tensor:
        parts = []
        for first, last in pairwise(cu.tolist()):
            q, k, v, g, beta = (x[None, first:last] for x in tensors)
            q, k = q.repeat_interleave(3, 2), k.repeat_interleave(3, 2)
            out, _ = torch_recurrent_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
            parts.append(out[0])
        return torch.cat(parts)

    tensors = tuple(x.detach().float().requires_grad_() for x in inputs(lengths))
    got = with_gradients(lambda *x: gated_delta_rule(*x, cu), tensors)
    assert_same(got, with_gradients(alone, tensors), 1e-5)


def test_a_decay_to_nothing_stays_finite() -> None:
    q, k, v, g, beta = inputs((2 * CHUNK,))
    tensors = tuple(x.detach().float().requires_grad_() for x in (q, k, v, g - 200, beta))
    got = with_gradients(lambda *x: gated_delta_rule(*x, bounds((2 * CHUNK,))), tensors)
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_begins_anew_with_every_document(lengths: tuple[int, ...], width: int) -> None:
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, generator=generator, dtype=torch.float64, requires_grad=True)

    def alone(x: Tensor, weight: Tensor) -> Tensor:
        parts = [torch.zeros(0, 3, dtype=x.dtype)]
        for part in x.split(list(lengths)) if lengths else ():
            if len(part):
                padded = conv1d(part.T[None], weight[:, None], padding=width - 1, groups=3)[0, :, : len(part)]
                parts.append(silu(padded.T))
        return torch.cat(parts)

    got = with_gradients(lambda *t: causal_convolution(*t, bounds(lengths)), (x, weight))
    if tokens:
        assert_same(got, with_gradients(alone, (x, weight)), 1e-12)


def test_bf16_comes_back_as_bf16() -> None:
    tensors, cu = [x.detach().bfloat16() for x in inputs((3, 70))], bounds((3, 70))
    assert gated_delta_rule(*tensors, cu).dtype is torch.bfloat16
    assert causal_convolution(tensors[2].flatten(1), torch.ones(18, 4).bfloat16(), cu).dtype is torch.bfloat16
