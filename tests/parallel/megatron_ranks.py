"""What the ranks do in the tests of the Megatron backend, and the plain torch that they are compared with.

Expected numbers come from transformers' Qwen3ForCausalLM, run document by document in one process, and from
torch.optim.AdamW over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine import schema
from engine.backends.base import TRAINED, Slice
from engine.data.batch import IGNORE, Batch, rows_to_batch
from engine.family import load_family

TINY: dict[str, Any] = {
    "vocab_size": 131,  # odd
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LR, CLIP, DECAY = 1e-3, 1.0, 0.1
Published = dict[tuple[str, str], Tensor]  # by kind and published name
Curve = Sequence[tuple[float, float]]  # loss and gradient norm of each step


@dataclass
class Plan:
    """What a backend is built from in a test."""

    layout: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)  # of TINY
    precision: str = "fp32"

    def run(self) -> schema.Run:
        from zoo.qwen3.config import Qwen3Config

        run = schema.Run(family="qwen3", model=Qwen3Config(name="test", **TINY | self.changes), job=schema.TrainJob())
        run.parallelism = schema.Parallelism(name="test", strategy="zero1")
        for key, value in self.layout.items():
            setattr(run.parallelism, key, value)
        run.precision.name = self.precision
        run.optim = schema.Optim(name="adamw", lr=LR, weight_decay=DECAY, clip_grad=CLIP)
        return run


class Source:
    """A TensorSource over whole tensors; moments that are not there are zero."""

    def __init__(self, tensors: Published) -> None:
        self._tensors = tensors

    def read(self, kind: str, name: str, shape: Any, offset: Any, extent: Any) -> Tensor:
        tensor = self._tensors[kind, name]
        assert tuple(tensor.shape) == tuple(shape), (kind, name, tensor.shape, shape)
        return tensor[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def assemble(slices: Iterable[Slice]) -> Published:
    """Whole tensors of the slices of all ranks; every element must come exactly once."""
    whole: Published = {}
    count: Published = {}
    for part in slices:
        key = (part.kind, part.name)
        if key not in whole:
            whole[key] = torch.zeros(part.shape, dtype=part.tensor.dtype)
            count[key] = torch.zeros(part.shape)
        where = tuple(slice(o, o + e) for o, e in zip(part.offset, part.tensor.shape, strict=True))
        whole[key][where] = part.tensor
        count[key][where] += 1
    uneven = [key for key, times in count.items() if not bool((times == 1).all())]
    assert not uneven, f"elements missing or repeated: {uneven}"
    return whole


# Rows of a global batch: lengths of the documents of each row. Odd lengths, one-token documents, rows of one document.
PACKED = ((1, 9, 7), (13, 4), (17,), (2, 2, 13))
DENSE = ((17,), (17,), (17,), (17,))


def global_batch(documents: Sequence[Sequence[int]], seed: int, vocab_size: int = 131) -> list[tuple[Tensor, ...]]:
    """Rows (tokens, labels, starts); some labels are missing, the third row has one only."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, lengths in enumerate(documents):
        tokens = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
        starts = torch.zeros(sum(lengths), dtype=torch.bool)
        starts[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
        labels = torch.full_like(tokens, IGNORE)
        labels[:-1] = tokens[1:]
        labels[:-1][starts[1:]] = IGNORE
        labels[3:5] = IGNORE
        if index == 2:
            labels[:-2] = IGNORE
        rows.append((tokens, labels, starts))
    return rows


def micro_batches(rows: Sequence[tuple[Tensor, ...]], dp_rank: int, dp_size: int, size: int) -> list[Batch]:
    """This rank's share of the rows in micro-batches of `size`."""
    share = len(rows) // dp_size
    mine = range(dp_rank * share, (dp_rank + 1) * share)
    return [
        rows_to_batch(*(torch.stack(t) for t in zip(*(rows[i] for i in ids), strict=True)), list(ids))
        for ids in (mine[first : first + size] for first in range(0, share, size))
    ]


def reference(changes: dict[str, Any], seed: int = 5) -> torch.nn.Module:
    """transformers' model in fp32, norms and biases random too."""
    import transformers

    config = transformers.Qwen3Config(**TINY | changes)
    config._attn_implementation = "eager"
    model = transformers.Qwen3ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, shift = (1.0, 0.5) if parameter.dim() == 1 and not name.endswith("bias") else (0.2, -0.1)
            parameter.copy_(shift + scale * torch.rand(parameter.shape, generator=generator))
    return model


def weights_of(model: torch.nn.Module) -> Published:
    """The published tensors, with moments of zero."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    zeros = {(kind, name): torch.zeros_like(t) for name, t in parameters.items() for kind in TRAINED[1:]}
    return {("param", name): t for name, t in parameters.items()} | zeros


def reference_loss(model: torch.nn.Module, rows: Sequence[tuple[Tensor, ...]]) -> tuple[list[Tensor], Tensor]:
    """Logits of every row and the mean loss, each document alone."""
    logits, loss_sum, tokens = [], torch.zeros(()), 0
    for row, labels, starts in rows:
        bounds = [*starts.nonzero().flatten().tolist(), len(row)]
        pieces = [model(input_ids=row[None, a:b]).logits[0] for a, b in pairwise(bounds)]
        logits.append(torch.cat(pieces))
        loss_sum = loss_sum + cross_entropy(logits[-1], labels, ignore_index=IGNORE, reduction="sum")
        tokens += int((labels != IGNORE).sum())
    return logits, loss_sum / tokens


def reference_steps(model: torch.nn.Module, steps: Sequence[Sequence[tuple[Tensor, ...]]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of AdamW over the reference."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for rows in steps:
        optimizer.zero_grad()
        _, loss = reference_loss(model, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def build(plan: Plan, mode: str, weights: Published, kinds: Sequence[str] = ("param",)) -> Any:
    """A backend on this rank, its weights loaded; the process group comes up if it is not."""
    from engine.backends import megatron
    from hardware import registry

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    backend = megatron.build(plan.run(), load_family("qwen3"), registry.get("cpu"), mode)
    backend.load_state(Source(weights), kinds)
    return backend


def forward(plan: Plan, weights: Published, rows: Sequence[tuple[Tensor, ...]], size: int, grad: bool = True) -> Any:
    """Logits by row (where this rank has them), the loss, and the slices of the gradients."""
    backend = build(plan, "forward", weights)
    batches = micro_batches(rows, backend.dp_rank, backend.dp_size, size)
    result = backend.forward(batches, grad)
    logits = {}
    for batch, micro in zip(batches, result.logits or [], strict=False):
        logits |= dict(zip(batch.sample_ids, micro, strict=True))
    gradients = list(backend.state(("grad",))) if grad else []
    backend.close()
    return logits, result.loss_sum / result.num_tokens, gradients


def train(
    plan: Plan,
    weights: Published,
    steps: Sequence[Sequence[tuple[Tensor, ...]]],
    size: int,
    updates: int = 0,
    evaluate: bool = False,
) -> Any:
    """The curve of (loss, gradient norm), the state afterwards, and the held-out loss of the last rows."""
    backend = build(plan, "train", weights, TRAINED)
    backend.set_optimizer_step(updates)
    curve, held_out = [], []
    for rows in steps:
        batches = micro_batches(rows, backend.dp_rank, backend.dp_size, size)
        if evaluate:
            loss_sum, tokens = backend.evaluate(batches)
            held_out.append(loss_sum / tokens)
        result = backend.train_step(batches, LR)
        curve.append((result.loss_sum / result.num_tokens, result.grad_norm))
    state = list(backend.state(TRAINED))
    assert backend.optimizer_step() == updates + len(steps)
    backend.close()
    return curve, state, held_out


def close() -> None:
    """Take the process group down; the next call brings up one of another size."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sequence(calls: Sequence[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Several of the functions above in one visit to the ranks."""
    values = [function(**kwargs) for function, kwargs in calls]
    close()
    return values


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    return ((got - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def assert_curve(got: Curve, wanted: Curve, tolerance: float = 1e-5) -> None:
    """Losses and gradient norms, relative."""
    assert len(got) == len(wanted)
    far = [
        (step, a, b)
        for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True))
        for a, b in zip(ours, theirs, strict=True)
        if not math.isclose(a, b, rel_tol=tolerance)
    ]
    assert not far, far


def one_row_only(plan: Plan, weights: Published, rows: Sequence[tuple[Tensor, ...]], size: int) -> Any:
    """`forward`, all rows on the first data-parallel rank."""
    backend = build(plan, "forward", weights)
    batches = micro_batches(rows, 0, 1, size) if backend.dp_rank == 0 else []
    result = backend.forward(batches, True)
    logits = {} if not batches else {0: result.logits[0][0]}
    gradients = list(backend.state(("grad",)))
    loss_sum, tokens = backend.evaluate(batches)
    backend.close()
    close()
    assert tokens == result.num_tokens
    assert math.isclose(loss_sum, result.loss_sum, rel_tol=1e-6)
    return logits, result.loss_sum / result.num_tokens, gradients


def one_step(plan: Plan, weights: Published, rows: Sequence[tuple[Tensor, ...]]) -> Any:
    """The result of a step, the updates made and the state afterwards."""
    backend = build(plan, "train", weights, TRAINED)
    result = backend.train_step(micro_batches(rows, backend.dp_rank, backend.dp_size, 1), LR)
    state = list(backend.state(TRAINED))
    updates = backend.optimizer_step()
    backend.close()
    close()
    return result, updates, state


def hold(plan: Plan, weights: Published) -> list[Slice]:
    """The weights of a backend that does nothing else."""
    backend = build(plan, "weights", weights)
    state = list(backend.state(("param",)))
    backend.close()
    close()
    return state
