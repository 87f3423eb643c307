"""Training steps of the native backend on this rank, and the same steps written by hand. Used by ranks and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zoo.qwen3.config import Qwen3Config

from engine.backends.base import Slice
from engine.data.batch import IGNORE, Batch, rows_to_batch
from engine.family import load_family
from engine.schema import Optim, Parallelism, Precision, Run

STEPS, ROWS, LENGTH, MICRO = 10, 8, 24, 2
KINDS = ("param", "exp_avg", "exp_avg_sq")
OPTIM = Optim(lr=2e-3, weight_decay=0.1, clip_grad=0.7)
MODEL = Qwen3Config(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=24,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def model_config(**changes: Any) -> Qwen3Config:
    return replace(MODEL, **changes)


def rate(step: int) -> float:
    return OPTIM.lr * (step + 1) / STEPS


def run_of(strategy: str, precision: str = "fp32", model: Qwen3Config = MODEL, **parallelism: Any) -> Run:
    """A run's config as a worker reads it."""
    return Run(
        family="qwen3",
        backend="native",
        model=model,
        optim=OPTIM,
        precision=Precision(name=precision),
        parallelism=Parallelism(strategy=strategy, **parallelism),
    )


def rows_of_step(step: int, packed: bool = True) -> list[Batch]:
    """All micro-batches of one global batch, different numbers of supervised tokens in each and none in one."""
    batches = []
    for micro in range(ROWS // MICRO):
        generator = torch.Generator().manual_seed(1000 * step + micro)
        tokens = torch.randint(0, MODEL.vocab_size // 3, (MICRO, LENGTH), generator=generator)
        labels = (tokens * 2 + 1).roll(1, 1)  # learnable
        labels[torch.rand(labels.shape, generator=generator) < 0.25 * micro] = IGNORE
        if micro == 1:
            labels[:] = IGNORE
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        if packed:
            starts = torch.rand(tokens.shape, generator=generator) < 0.15
        first = step * ROWS + micro * MICRO
        batches.append(rows_to_batch(tokens, labels, starts, list(range(first, first + MICRO))))
    return batches


class Values:
    """A TensorSource of tensors by (kind, name): what every layout starts from."""

    def __init__(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        self.tensors = tensors

    def read(self, kind: str, name: str, shape: Any, offset: Any, extent: Any) -> Tensor:
        whole = self.tensors[kind, name]
        assert tuple(whole.shape) == tuple(shape)
        return whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def first_values(model: Qwen3Config = MODEL) -> Values:
    """Random weights with norms that bite."""
    from engine.llm.grouped import weight_map

    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in weight_map(model).published.items():
        tensor = torch.randn(shape, generator=generator)
        tensors["param", name] = 0.1 * tensor if len(shape) > 1 else 1 + 0.3 * tensor
    return Values(tensors)


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size); gloo, from the environment that the test's ranks have."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def build(run: Run, mode: str = "train") -> Any:
    from engine.backends.native import build
    from hardware import registry

    return build(run, load_family("qwen3"), registry.get("cpu"), mode)


def share(batches: list[Batch], rank: int, ranks: int) -> list[Batch]:
    count = len(batches) // ranks
    return batches[rank * count : (rank + 1) * count]


def whole(slices: list[Slice]) -> dict[tuple[str, str], Tensor]:
    """The tensors of this rank's slices; NaN where other ranks hold them."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for s in slices:
        target = tensors.setdefault((s.kind, s.name), torch.full(s.shape, torch.nan))
        part = target[tuple(slice(o, o + e) for o, e in zip(s.offset, s.tensor.shape, strict=True))]
        assert part.isnan().all(), f"{s.name}: an element comes twice"
        part.copy_(s.tensor)
    return tensors


def merge(parts: list[dict[tuple[str, str], Tensor]]) -> dict[tuple[str, str], Tensor]:
    """The tensors of all ranks together; every element exactly once."""
    merged: dict[tuple[str, str], Tensor] = {}
    for part in parts:
        for key, tensor in part.items():
            target = merged.setdefault(key, torch.full_like(tensor, torch.nan))
            assert not (~target.isnan() & ~tensor.isnan()).any(), f"{key}: an element comes twice"
            target.copy_(torch.where(tensor.isnan(), target, tensor))
    assert not any(t.isnan().any() for t in merged.values()), "an element comes never"
    return merged


def train(run: Run, values: Values, start: int, stop: int) -> tuple[list[tuple[float, int, float]], dict[Any, Tensor]]:
    """Steps [start, stop) on this rank; (loss sum, tokens, gradient norm) of each, and this rank's state at the end."""
    with process_group() as (rank, ranks):
        backend = build(run)
        kinds = [kind for kind in KINDS if any(k == kind for k, _ in values.tensors)]
        backend.load_state(values, kinds)
        backend.set_optimizer_step(start)
        results = []
        for step in range(start, stop):
            result = backend.train_step(share(rows_of_step(step), rank, ranks), rate(step))
            results.append((result.loss_sum, result.num_tokens, result.grad_norm))
        assert backend.optimizer_step() == stop
        state = whole(list(backend.state(KINDS)))
        backend.close()
    return results, state


def reference_by_hand(model: Qwen3Config = MODEL) -> torch.nn.Module:
    """transformers' own model with the first values, eager attention."""
    import transformers

    from engine.backends.native.model import reference_config

    config = reference_config(load_family("qwen3"), model)
    config._attn_implementation = "eager"
    reference = transformers.Qwen3ForCausalLM(config)
    values = first_values(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values.tensors["param", name])
    return reference


def loss_sum_by_hand(reference: torch.nn.Module, batches: list[Batch]) -> tuple[Tensor, int]:
    """Loss sum and supervised tokens, every document run alone."""
    loss, count = torch.zeros(()), 0
    for batch in batches:
        for low, high in pairwise(batch.cu_seqlens.tolist()):
            logits = reference(input_ids=batch.tokens_BS.flatten()[None, low:high]).logits[0]
            labels = batch.labels_BS.flatten()[low:high]
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            count += int((labels != IGNORE).sum())
    return loss, count


def loss_by_hand(batches: list[Batch]) -> tuple[float, int]:
    """The first values' loss sum and number of tokens."""
    with torch.no_grad():
        loss, count = loss_sum_by_hand(reference_by_hand(), batches)
    return loss.item(), count


def by_hand(model: Qwen3Config = MODEL, stop: int = STEPS) -> tuple[list[tuple[float, int, float]], dict[Any, Tensor]]:
    """The same steps in plain torch on transformers' own model, every document alone: eager attention, no packing."""
    reference = reference_by_hand(model)
    named = dict(reference.named_parameters())
    decayed = [p for p in named.values() if p.dim() > 1]
    plain = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)
    results = []
    for step in range(stop):
        loss, count = loss_sum_by_hand(reference, rows_of_step(step))
        optimizer.zero_grad()
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), OPTIM.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        results.append((loss.item(), count, norm.item()))
    return results, {("param", name): p.detach().clone() for name, p in named.items()}


def poisoned(run: Run, values: Values) -> tuple[Any, bool, int]:
    """A step in which one micro-batch's loss is not finite; its result, whether anything changed, the updates made."""
    with process_group() as (rank, ranks):
        backend = build(run)
        backend.load_state(values, ("param",))
        batches = rows_of_step(0)
        batches[2].tokens_BS[1] = 100  # a token whose embedding is infinite
        before = {(s.kind, s.name): s.tensor.clone() for s in backend.state(KINDS)}
        result = backend.train_step(share(batches, rank, ranks), rate(0))
        same = all(torch.equal(before[s.kind, s.name], s.tensor) for s in backend.state(KINDS))
        after = backend.train_step(share(rows_of_step(1), rank, ranks), rate(0))
        updates = backend.optimizer_step()
        backend.close()
    return (result.bad_samples, result.bad_rank, result.loss_sum, after.loss_sum), same, updates


def uneven(run: Run, values: Values) -> tuple[Any, Any, list[Tensor], dict[Any, Tensor]]:
    """Evaluation and forward where the first rank has all the batches; losses, logits and this rank's gradients."""
    with process_group() as (rank, _):
        backend = build(run, "forward")
        backend.load_state(values, ("param",))
        batches = rows_of_step(3) if rank == 0 else []
        evaluated = backend.evaluate(batches)
        result = backend.forward(batches, grad=True)
        grads = whole(list(backend.state(("grad",))))
        backend.close()
    return evaluated, (result.loss_sum, result.num_tokens), result.logits, grads
