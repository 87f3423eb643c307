"""Attention against the textbook: softmax(q k^T) v over the tokens that a mask allows, in float64."""

import math

import pytest
import torch

from hardware.kernels import tail
from hardware.kernels.attention import (
    ReferenceAttention,
    causal_attention,
    document_lengths,
    tails_attention,
    varlen_attention,
)
from hardware.nvidia import Nvidia
from hardware.nvidia.attention import NvidiaAttention

needs_gpu = pytest.mark.skipif(not Nvidia().detect().available, reason="no NVIDIA GPU")


def textbook(q_THD, k_TKD, v_TKD, lengths, scale, window=None, sinks=None):
    """Attention as its definition says, with a T x T mask of documents and order.

    A window hides keys that are `window` or more places earlier; a sink is one more score in a head's softmax.
    """
    tokens, heads = q_THD.shape[:2]
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    order = torch.arange(tokens)
    allowed = (document[:, None] == document[None, :]) & (order[:, None] >= order[None, :])
    if window is not None:
        allowed &= order[:, None] - order[None, :] < window
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("thd,shd->hts", q_THD, k) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, tokens, 1)], dim=-1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :tokens], v)


def make(tokens, heads, kv_heads, width, value_width, dtype):
    torch.manual_seed(tokens + heads)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    return [torch.randn(tokens, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


CASES = [
    # lengths, heads, key/value heads, width, width of the value
    ([7], 4, 4, 8, 8),
    ([1], 1, 1, 3, 3),
    ([1, 1, 1], 4, 2, 24, 24),
    ([5, 1, 12, 5, 1, 30], 4, 1, 24, 24),
    ([16, 16, 16], 6, 2, 17, 17),
    ([3, 0, 4, 0], 2, 2, 8, 5),
    ([130, 1, 129], 8, 2, 64, 64),
]


@pytest.mark.parametrize("attend", [varlen_attention, NvidiaAttention().varlen])
@pytest.mark.parametrize("lengths, heads, kv_heads, width, value_width", CASES)
def test_documents_equal_the_textbook(attend, lengths, heads, kv_heads, width, value_width):
    scale = 0.3
    q, k, v = make(sum(lengths), heads, kv_heads, width, value_width, torch.float32)
    expected_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = textbook(*expected_inputs, lengths, scale)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    out = attend(q, k, v, cu_seqlens, max(lengths), scale)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=0)
    weight = torch.randn_like(expected)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, theirs in zip((q, k, v), expected_inputs, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() <= 2e-6 * (theirs.grad.norm() + weight.norm())


@pytest.mark.parametrize(
    "rows, length, heads, kv_heads, width", [(1, 1, 1, 1, 2), (3, 33, 6, 2, 24), (2, 128, 4, 4, 16)]
)
def test_rows_equal_the_textbook_and_the_default_scale(rows, length, heads, kv_heads, width):
    q, k, v = make(rows * length, heads, kv_heads, width, width, torch.float64)
    expected = textbook(q, k, v, [length] * rows, width**-0.5)
    dense = [x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(causal_attention(*dense).transpose(1, 2).flatten(0, 1), expected)
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    torch.testing.assert_close(varlen_attention(q, k, v, cu_seqlens, length), expected)


TAILS = [
    # queries of each document, its keys, heads, key/value heads, width, width of the value
    ([1], [1], 1, 1, 2, 2),
    ([3], [11], 4, 2, 8, 8),
    ([7], [8], 4, 4, 24, 16),
    ([5, 4, 4, 1, 9], [12, 4, 4, 1, 9], 6, 2, 24, 24),  # as a rank of context parallelism has them
    ([2, 3, 0, 5], [2, 9, 4, 30], 4, 1, 8, 8),
    ([70, 6], [200, 6], 8, 2, 64, 64),
]


def tails_inputs(queries, keys, heads, kv_heads, width, value_width, dtype):
    """Query, key and value of whole documents, which of the queries ask, and both boundaries."""
    inputs = make(sum(keys), heads, kv_heads, width, value_width, dtype)
    ask = torch.cat([torch.arange(m) >= m - n for n, m in zip(queries, keys, strict=True)])
    bounds = (torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32) for lengths in (queries, keys))
    return inputs, ask, *bounds


@pytest.mark.parametrize("block", [1 << 24, 1 << 8])  # one block of queries, and several
@pytest.mark.parametrize("attend", [tails_attention, NvidiaAttention().tails])
@pytest.mark.parametrize("queries, keys, heads, kv_heads, width, value_width", TAILS)
def test_tails_equal_the_textbook(attend, queries, keys, heads, kv_heads, width, value_width, block, monkeypatch):
    monkeypatch.setattr(tail, "BLOCK_SCORES", block)
    scale = 0.3
    (q, k, v), ask, cu_q, cu_k = tails_inputs(queries, keys, heads, kv_heads, width, value_width, torch.float32)
    wanted_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = textbook(*wanted_inputs, keys, scale)[ask]
    out = attend(q[ask], k, v, cu_q, cu_k, max(queries), max(keys), scale)
    torch.testing.assert_close(out.double(), wanted, atol=5e-6, rtol=0)
    weight = torch.randn_like(wanted)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    for ours, theirs in zip((q, k, v), wanted_inputs, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() <= 2e-6 * (theirs.grad.norm() + weight.norm())


WINDOWS = [
    # queries of each document, its keys, heads, key/value heads, width, width of the value, window, sinks
    ([1], [1], 1, 1, 2, 2, 1, True),
    ([9], [9], 4, 2, 8, 8, 1, False),
    ([20], [20], 4, 2, 8, 6, 3, False),
    ([7, 7, 7], [7, 7, 7], 6, 3, 8, 5, 4, True),
    ([7, 7], [7, 7], 4, 2, 8, 8, 7, True),
    ([12, 1, 0, 40], [12, 1, 0, 40], 4, 4, 8, 8, 5, True),
    ([12, 30], [12, 30], 4, 1, 8, 8, None, True),
    ([5, 4, 2, 0, 9], [12, 4, 30, 3, 9], 6, 2, 24, 16, 6, True),
    ([50, 3], [70, 60], 4, 2, 8, 8, 8, False),
]


@pytest.mark.parametrize("block", [1 << 24, 1 << 8])
@pytest.mark.parametrize("attention", [ReferenceAttention(), NvidiaAttention()])
@pytest.mark.parametrize("queries, keys, heads, kv_heads, width, value_width, window, with_sinks", WINDOWS)
def test_windows_and_sinks_equal_the_textbook(
    attention, queries, keys, heads, kv_heads, width, value_width, window, with_sinks, block, monkeypatch
):
    """By `tails`, and where all tokens ask by `varlen`, and where they are equal documents by `causal` as well."""
    monkeypatch.setattr(tail, "BLOCK_SCORES", block)
    scale = 0.3
    inputs, ask, cu_q, cu_k = tails_inputs(queries, keys, heads, kv_heads, width, value_width, torch.float32)
    sinks = (torch.randn(heads) * 2).requires_grad_() if with_sinks else None
    exact = [x.detach().double().requires_grad_() for x in (*inputs, *([sinks] if with_sinks else []))]
    wanted = textbook(*exact[:3], keys, scale, window, exact[3] if with_sinks else None)[ask]
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    how, (q, k, v) = (scale, window, sinks), inputs
    outs = [attention.tails(q[ask], k, v, cu_q, cu_k, max(queries), max(keys), *how)]
    if queries == keys:
        outs.append(attention.varlen(q, k, v, cu_k, max(keys), *how))
        if len(set(keys)) == 1:
            rows = [x.unflatten(0, (len(keys), keys[0])).transpose(1, 2) for x in inputs]
            outs.append(attention.causal(*rows, *how).transpose(1, 2).flatten(0, 1))
    for out in outs:
        torch.testing.assert_close(out.double(), wanted, atol=5e-6, rtol=0)
        ours = [*inputs, *([sinks] if with_sinks else [])]
        grads = torch.autograd.grad((out * weight).sum(), ours)
        for mine, theirs in zip(grads, exact, strict=True):
            assert (mine.double() - theirs.grad).norm() <= 2e-6 * (theirs.grad.norm() + weight.norm())


def test_a_later_or_foreign_token_changes_nothing():
    q, k, v = make(20, 4, 2, 8, 8, torch.float32)
    cu_seqlens = torch.tensor([0, 6, 20], dtype=torch.int32)
    before = varlen_attention(q, k, v, cu_seqlens, 14)
    with torch.no_grad():
        k[10:] += 1e3
        v[10:] -= 1e3
    after = varlen_attention(q, k, v, cu_seqlens, 14)
    assert torch.equal(before[:10], after[:10])
    assert not torch.allclose(before[10:], after[10:])


def test_only_empty_documents():
    q, k, v = make(0, 4, 2, 8, 8, torch.float32)
    for boundaries in ([0, 0], [0, 0, 0]):
        assert varlen_attention(q, k, v, torch.tensor(boundaries, dtype=torch.int32), 0).shape == (0, 4, 8)


def test_boundaries_that_do_not_cover_the_tokens_are_an_error():
    q, k, v = make(10, 2, 2, 4, 4, torch.float32)
    with pytest.raises(RuntimeError):
        varlen_attention(q, k, v, torch.tensor([0, 4, 9], dtype=torch.int32), 5)


def test_document_lengths():
    assert document_lengths(torch.tensor([0, 3, 3, 10], dtype=torch.int32)) == [3, 0, 7]
    assert document_lengths(torch.tensor([0], dtype=torch.int32)) == []


@needs_gpu
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("lengths, heads, kv_heads, width, value_width", CASES)
def test_flash_documents_equal_the_textbook(lengths, heads, kv_heads, width, value_width, on_host):
    device, scale = Nvidia().device(0), 0.3
    half = [x.detach().bfloat16() for x in make(sum(lengths), heads, kv_heads, width, value_width, torch.float32)]
    expected_inputs = [x.double().requires_grad_() for x in half]
    q, k, v = (x.to(device).requires_grad_() for x in half)
    expected = textbook(*expected_inputs, lengths, scale)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    out = NvidiaAttention().varlen(q, k, v, cu_seqlens if on_host else cu_seqlens.to(device), max(lengths), scale)
    # bf16 keeps 8 bits: a relative error of 2^-8 in each of a few roundings.
    close = {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(out.double().cpu(), expected, **close)
    weight = torch.randn_like(expected)
    (out * weight.to(out)).sum().backward()
    (expected * weight.bfloat16().double()).sum().backward()
    for ours, theirs in zip((q, k, v), expected_inputs, strict=True):
        assert (ours.grad.double().cpu() - theirs.grad).norm() <= 2e-2 * theirs.grad.norm() + 1e-3 * weight.norm()


@needs_gpu
@pytest.mark.parametrize("queries, keys, heads, kv_heads, width, value_width", TAILS)
def test_flash_tails_equal_the_textbook(queries, keys, heads, kv_heads, width, value_width):
    device, scale = Nvidia().device(0), 0.3
    inputs, ask, cu_q, cu_k = tails_inputs(queries, keys, heads, kv_heads, width, value_width, torch.float32)
    half = [x.detach().bfloat16() for x in inputs]
    wanted_inputs = [x.double().requires_grad_() for x in half]
    wanted = textbook(*wanted_inputs, keys, scale)[ask]
    q, k, v = (x.to(device).requires_grad_() for x in half)
    out = NvidiaAttention().tails(q[ask.to(device)], k, v, cu_q.to(device), cu_k, max(queries), max(keys), scale)
    torch.testing.assert_close(out.double().cpu(), wanted, atol=3e-2, rtol=3e-2)
    weight = torch.randn_like(wanted)
    (out * weight.to(out)).sum().backward()
    (wanted * weight.bfloat16().double()).sum().backward()
    for ours, theirs in zip((q, k, v), wanted_inputs, strict=True):
        assert (ours.grad.double().cpu() - theirs.grad).norm() <= 2e-2 * theirs.grad.norm() + 1e-3 * weight.norm()


@needs_gpu
@pytest.mark.parametrize("queries, keys, heads, kv_heads, width, value_width, window, with_sinks", WINDOWS)
def test_windows_and_sinks_on_the_gpu(queries, keys, heads, kv_heads, width, value_width, window, with_sinks):
    device, scale = Nvidia().device(0), 0.3
    inputs, ask, cu_q, cu_k = tails_inputs(queries, keys, heads, kv_heads, width, value_width, torch.float32)
    half = [x.detach().bfloat16() for x in inputs]
    sinks = torch.randn(heads) if with_sinks else None
    wanted_inputs = [x.double().requires_grad_() for x in half]
    exact_sinks = None if sinks is None else sinks.double()
    wanted = textbook(*wanted_inputs, keys, scale, window, exact_sinks)[ask]
    q, k, v = (x.to(device).requires_grad_() for x in half)
    how = (scale, window, None if sinks is None else sinks.to(device))
    out = NvidiaAttention().tails(q[ask.to(device)], k, v, cu_q.to(device), cu_k, max(queries), max(keys), *how)
    torch.testing.assert_close(out.double().cpu(), wanted, atol=3e-2, rtol=3e-2)
    weight = torch.randn_like(wanted)
    (out * weight.to(out)).sum().backward()
    (wanted * weight.bfloat16().double()).sum().backward()
    for ours, theirs in zip((q, k, v), wanted_inputs, strict=True):
        assert (ours.grad.double().cpu() - theirs.grad).norm() <= 2e-2 * theirs.grad.norm() + 1e-3 * weight.norm()
