"""How a micro-batch's tokens are divided, and attention over a group, against the whole computed at once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from engine.backends.megatron import context_parallel
from engine.backends.megatron.context_parallel import Gathered, attend, chunks, in_order, share, token_multiple
from hardware.kernels.attention import tails_attention, varlen_attention

CPU = torch.device("cpu")
DOCUMENTS = [[48], [1, 9, 6, 8, 24], [5, 43], [12, 12, 12, 12], [1] * 48, [47, 1], [24, 24]]


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_shares_are_put_back_in_order_and_weigh_the_same(cp: int) -> None:
    tokens = torch.arange(48)
    shares = [share(tokens, cp, rank) for rank in range(cp)]
    assert torch.equal(in_order(torch.cat(shares), cp), tokens)
    # A causal query at place t sees t + 1 keys: rows of one document cost every rank as much.
    assert len({int((places + 1).sum()) for places in shares}) == 1


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_the_ranks_chunks_give_the_attention_of_all_tokens(cp: int, lengths: list[int], window: int | None) -> None:
    torch.manual_seed(cp)
    how = (None, window, None if window is None else torch.randn(4, dtype=torch.float64))
    q, k, v = (torch.randn(48, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    cu_seqlens = boundaries(lengths)
    wanted = varlen_attention(q, k, v, cu_seqlens, max(lengths), *how)
    got = []
    for rank in range(cp):
        mine = share(q, cp, rank)
        for part in chunks(cu_seqlens, cp, rank, CPU):
            bounds = (part.cu_seqlens_q, part.cu_seqlens_k, part.max_q, part.max_k)
            assert part.cu_seqlens_q.diff().max() == part.max_q and part.cu_seqlens_k.diff().max() == part.max_k
            got.append(tails_attention(mine[part.queries], k[part.keys], v[part.keys], *bounds, *how))
    torch.testing.assert_close(in_order(torch.cat(got), cp), wanted)


@pytest.mark.parametrize(
    ("cp", "tp", "sp", "multiple"),
    [(1, 2, False, 1), (1, 2, True, 2), (2, 1, False, 4), (2, 2, True, 4), (2, 8, True, 16), (3, 3, True, 18)],
)
def test_padding(cp: int, tp: int, sp: bool, multiple: int) -> None:
    """Two equal chunks for each rank of cp, and a rank's tokens divided over tp."""
    config = SimpleNamespace(context_parallel_size=cp, tensor_model_parallel_size=tp, sequence_parallel=sp)
    assert token_multiple(config) == multiple


@pytest.mark.parametrize(
    ("count", "pp", "size"),
    [(2, 2, 2), (3, 2, 3), (4, 2, 2), (5, 2, 3), (7, 2, 4), (8, 4, 4), (9, 4, 5), (7, 4, 7), (11, 4, 6)],
)
def test_micro_batches_in_a_row(count: int, pp: int, size: int) -> None:
    """The smallest group from pp on whose remainder is nothing or at least pp, as megatron-core demands."""
    from engine.backends.megatron.pipeline import group_size  # here: importing megatron-core takes its time

    assert group_size(count, pp) == size
    assert count % size == 0 or count % size >= pp


@pytest.fixture
def group():  # type: ignore[no-untyped-def]
    """A group of one: the same collectives, without other processes."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("lengths", DOCUMENTS[:3])
def test_gradients_and_what_is_kept_for_them(group, lengths: list[int], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Keys and values of all tokens are gone between forward and backward, and the gradients are the whole's."""
    held = []

    def all_tokens(*args):  # type: ignore[no-untyped-def]
        whole = original(*args)
        held.append(weakref.ref(whole))
        return whole

    original = context_parallel.all_tokens
    monkeypatch.setattr(context_parallel, "all_tokens", all_tokens)
    torch.manual_seed(3)
    inputs = [torch.randn(48, heads, width, dtype=torch.float64) for heads, width in ((4, 8), (1, 8), (1, 6))]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    cu_seqlens = boundaries(lengths)
    out = attend(*ours, chunks(cu_seqlens, 1, 0, CPU), group, tails_attention, 0.3)
    gc.collect()
    wanted = varlen_attention(*theirs, cu_seqlens, max(lengths), 0.3)
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(wanted)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert len(held) == 2, "gathered once forwards and once backwards"


def test_what_lies_in_the_gathered_tensor_is_kept_as_a_place(group) -> None:  # type: ignore[no-untyped-def]
    own = torch.randn(6, 4, requires_grad=True)
    keys = Gathered(own, group)
    whole = keys.gather()
    storage = weakref.ref(whole.untyped_storage())
    with keys.saved_as_places(whole):
        out = keys.needed_by(whole[2:].exp() @ torch.ones(4, 3) * 2 + (whole[:4] * whole[2:]).sum())
    del whole
    gc.collect()
    assert storage() is None
    out.sum().backward()
    again = own.detach().clone().requires_grad_()
    (again[2:].exp() @ torch.ones(4, 3) * 2 + (again[:4] * again[2:]).sum()).sum().backward()
    torch.testing.assert_close(own.grad, again.grad)
    assert keys.whole_TE is None
