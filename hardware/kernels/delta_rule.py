"""What gated DeltaNet layers compute over packed documents: the interface, and the reference in plain torch.

The gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10) keeps for each head a state S [D, E],
zero at a document's beginning, and for each token takes

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(D)

with queries and keys of unit length. Shapes: T tokens of all documents one after another, K key heads of width D, H
value heads of width E (K divides H; value head h reads key head h // (H / K)), C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from hardware.kernels.attention import document_lengths

CHUNK = 64  # tokens that are solved together
EPSILON = 1e-6  # under the root of a length, as flash-linear-attention has it


@dataclass(frozen=True)
class DeltaRule:
    """An implementation. `cu_seqlens` is int32 [documents + 1], 0 first and T last, on any device."""

    # x [T, C], weight [C, W], cu_seqlens -> [T, C]: silu of a causal convolution of each channel inside each document.
    convolve: Callable[[Tensor, Tensor, Tensor], Tensor]
    # q, k [T, K, D], v [T, H, E], g [T, H] (at most 0), beta [T, H], cu_seqlens -> [T, H, E]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_convolution(x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See `DeltaRule.convolve`. Sums are at least fp32; a document's first tokens see zeros before them."""
    lengths = tuple(document_lengths(cu_seqlens))
    inside_T, x, weight = _inside(lengths, x_TC.device), exact(x_TC), exact(weight_CW)
    out = x * weight[:, -1]
    for back in range(1, min(weight.shape[1], max(lengths, default=0))):
        earlier = pad(x[:-back], (0, 0, back, 0)).masked_fill((inside_T < back).unsqueeze(1), 0.0)
        out = out + earlier * weight[:, -1 - back]
    return silu(out).to(x_TC.dtype)


def gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THE: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """See `DeltaRule.attend`: chunks of each document by matrix products, and a scan over the chunks.

    Within a chunk the updates are a triangular system (Yang et al., arXiv 2406.06484, section 3). All documents' chunks
    are solved at once; the scan goes through the documents side by side. In at least fp32, with autograd.
    """
    lengths = tuple(document_lengths(cu_seqlens))
    size = min(CHUNK, max(lengths, default=0))
    if size == 0:
        return v_THE.clone()
    place_T, active = _chunks(lengths, size, v_THE.device)
    count, repeat, width = sum(active), v_THE.shape[1] // k_TKD.shape[1], v_THE.shape[2]

    def chunked(x_T: Tensor) -> Tensor:  # [N, H, chunk, ...]; tokens that fill a chunk up are zero and change no state
        filled = x_T.new_zeros(count * size, *x_T.shape[1:]).index_copy(0, place_T, x_T)
        return filled.unflatten(0, (count, size)).transpose(1, 2)

    q, k = (chunked(unit(exact(x)).repeat_interleave(repeat, 1)) for x in (q_TKD, k_TKD))
    v, beta, decay = chunked(exact(v_THE)), chunked(exact(beta_TH)).unsqueeze(-1), chunked(exact(g_TH)).cumsum(-1)
    q = q * q.shape[-1] ** -0.5
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: differences to later tokens are positive and could overflow.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    decay, transposed = decay.unsqueeze(-1), k.transpose(-1, -2)
    system, scores = (k * beta) @ transposed * between, q @ transposed * between
    sides = torch.cat([v * beta, k * beta * decay.exp()], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    value, erased = solved[..., :width], solved[..., width:]
    query, key = q * decay.exp(), k * (decay[:, :, -1:] - decay).exp()
    kept, out, first = decay[:, :, -1:].exp(), [], 0
    state = q.new_zeros(active[0], q.shape[1], q.shape[-1], width)
    for documents in active:
        here, state = slice(first, first + documents), state[:documents]
        new = value[here] - erased[here] @ state
        out.append(query[here] @ state + scores[here] @ new)
        state = state * kept[here] + key[here].transpose(-1, -2) @ new
        first += documents
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[place_T].to(v_THE.dtype)


def recurrent_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THE: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """See `DeltaRule.attend`: the definition, token by token."""
    repeat = v_THE.shape[1] // k_TKD.shape[1]
    q, k = (unit(exact(x)).repeat_interleave(repeat, 1) for x in (q_TKD, k_TKD))
    v, beta, kept = exact(v_THE), exact(beta_TH).unsqueeze(-1), exact(g_TH).exp()[..., None, None]
    q, starts, out = q * q.shape[-1] ** -0.5, {*cu_seqlens.tolist()}, []
    zero = q.new_zeros(*q.shape[1:], v.shape[-1])
    for t in range(q.shape[0]):
        state = (zero if t in starts else state) * kept[t]  # noqa: F821  token 0 starts a document
        known = (state * k[t].unsqueeze(-1)).sum(1)
        state = state + k[t].unsqueeze(-1) * (beta[t] * (v[t] - known)).unsqueeze(1)
        out.append((state * q[t].unsqueeze(-1)).sum(1))
    return torch.stack(out).to(v_THE.dtype) if out else v_THE.clone()


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, but for `EPSILON`."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def exact(x: Tensor) -> Tensor:
    """In fp32, or fp64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


@lru_cache(maxsize=32)
def _inside(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [T]: the place of each token in its document."""
    with torch.inference_mode(False):  # what is kept here may serve a backward pass
        return torch.cat([torch.arange(length) for length in (*lengths, 0)]).to(device)


@lru_cache(maxsize=32)
def _chunks(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Where each token goes, and how many documents have a first, second ... chunk.

    First chunks of all documents come first, then second chunks and so on; in each step the longest document first, so
    that the documents that go on are the first ones.
    """
    with torch.inference_mode(False):
        counts = -(-torch.tensor(lengths) // size)
        rank = counts.argsort(descending=True, stable=True).argsort()
        active = torch.stack([(counts > step).sum() for step in range(int(counts.max()))])
        document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        inside_T = _inside(lengths, torch.device("cpu"))
        step_T = inside_T // size
        place_T = ((active.cumsum(0) - active)[step_T] + rank[document_T]) * size + inside_T % size
        return place_T.to(device), tuple(active.tolist())


REFERENCE = DeltaRule(causal_convolution, gated_delta_rule)
