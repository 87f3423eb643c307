"""Sparse attention and the indexer's loss against the formulas of the paper, written as loops over single queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hardware.kernels.sparse_attention import NONE, REFERENCE, Bounds

HEADS, WIDTH, VALUE, INDEX_HEADS, INDEX_WIDTH = 3, 6, 5, 4, 7
SCALE = 0.3
# Queries and keys of each document: whole ones, one token, the last parts of longer ones, none.
DOCUMENTS = [((5, 5), (1, 1), (7, 7)), ((3, 9), (4, 4)), ((0, 2), (2, 6))]


def inputs(documents: tuple[tuple[int, int], ...]) -> tuple[dict[str, Tensor], Bounds]:
    torch.manual_seed(3)
    n, m = (sum(lengths) for lengths in zip(*documents, strict=True))
    shapes = {
        "q": (n, HEADS, WIDTH),
        "k": (m, HEADS, WIDTH),
        "v": (m, HEADS, VALUE),
        "iq": (n, INDEX_HEADS, INDEX_WIDTH),
        "ik": (m, INDEX_WIDTH),
        "iw": (n, INDEX_HEADS),
    }
    tensors = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    cu = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int() for lengths in zip(*documents, strict=True)]
    return tensors, Bounds(*cu)


def queries(documents: tuple[tuple[int, int], ...]) -> list[tuple[int, list[int]]]:
    """Each query and the keys that it sees."""
    found, query, key = [], 0, 0
    for n, m in documents:
        found += [(query + j, list(range(key, key + m - n + j + 1))) for j in range(n)]
        query, key = query + n, key + m
    return found


def index_score(x: dict[str, Tensor], t: int, s: int) -> Tensor:
    """Equation 1, with the two roots of the published code."""
    total = torch.zeros(())
    for j in range(INDEX_HEADS):
        dot = (x["iq"][t, j] * x["ik"][s]).sum() / math.sqrt(INDEX_WIDTH)
        total = total + x["iw"][t, j] / math.sqrt(INDEX_HEADS) * torch.relu(dot)
    return total


def best(x: dict[str, Tensor], t: int, seen: list[int], topk: int) -> list[int]:
    """Equation 2's set: the keys with the k best index scores."""
    return sorted(sorted(seen, key=lambda s: -index_score(x, t, s).item())[:topk])


def probabilities(x: dict[str, Tensor], t: int, head: int, keys: list[int]) -> Tensor:
    return torch.stack([(x["q"][t, head] * x["k"][s, head]).sum() * SCALE for s in keys]).softmax(0)


@pytest.mark.parametrize("topk", [1, 3, 50])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_attention_to_the_chosen_keys(documents: tuple[tuple[int, int], ...], topk: int) -> None:
    x, bounds = inputs(documents)
    chosen = REFERENCE.choose(x["iq"], x["ik"], x["iw"], bounds, topk)
    out = REFERENCE.attend(x["q"], x["k"], x["v"], chosen, bounds, SCALE)
    expected = []
    for t, seen in queries(documents):
        keys = best(x, t, seen, topk)
        assert sorted(s for s in chosen[t].tolist() if s != NONE) == keys
        heads = [probabilities(x, t, h, keys) @ torch.stack([x["v"][s, h] for s in keys]) for h in range(HEADS)]
        expected.append(torch.stack(heads))
    wanted = torch.stack(expected)
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(out)
    names = ("q", "k", "v")
    mine = torch.autograd.grad((out * weight).sum(), [x[name] for name in names], allow_unused=True)
    theirs = torch.autograd.grad((wanted * weight).sum(), [x[name] for name in names], allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_indexers_loss(documents: tuple[tuple[int, int], ...], topk: int | None) -> None:
    """Equation 3 over all keys (dense warm-up), equation 4 over the chosen ones (sparse stage)."""
    x, bounds = inputs(documents)
    index = (x["iq"], x["ik"], x["iw"])
    chosen = None if topk is None else REFERENCE.choose(*index, bounds, topk)
    loss = REFERENCE.indexer_loss(index, x["q"], x["k"], chosen, bounds, SCALE, lambda p: p)
    expected = []
    for t, seen in queries(documents):
        keys = seen if topk is None else best(x, t, seen, topk)
        summed = sum(probabilities(x, t, h, keys) for h in range(HEADS)).detach()
        target = summed / summed.sum()
        scores = torch.stack([index_score(x, t, s) for s in keys])
        expected.append((target * (target.log() - scores.log_softmax(0))).sum())
    wanted = torch.stack(expected)
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(total.sum(), index) for total in (loss, wanted))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    again = REFERENCE.indexer_loss(index, x["q"], x["k"], chosen, bounds, SCALE, lambda p: p)
    gradients = torch.autograd.grad(again.sum(), (x["q"], x["k"]), allow_unused=True)
    assert gradients == (None, None), "the loss trains the indexer alone"


def test_heads_that_are_divided_over_ranks() -> None:
    """What ranks have of the probabilities is added up before it is divided by its sum."""
    x, bounds = inputs(DOCUMENTS[0])
    index = (x["iq"], x["ik"], x["iw"])
    whole = REFERENCE.indexer_loss(index, x["q"], x["k"], None, bounds, SCALE, lambda p: p)
    rest: list[Tensor] = []
    REFERENCE.indexer_loss(index, x["q"][:, 1:], x["k"][:, 1:], None, bounds, SCALE, lambda p: (rest.append(p), p)[1])
    parts = iter(rest)
    one = REFERENCE.indexer_loss(index, x["q"][:, :1], x["k"][:, :1], None, bounds, SCALE, lambda p: p + next(parts))
    torch.testing.assert_close(one, whole)
