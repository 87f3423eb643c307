"""The protocol between the training loop and a backend. The loop and the jobs know nothing else of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from engine.data.batch import Batch
from engine.family import Family
from engine.schema import Run
from hardware.base import Hardware

TRAINED = ("param", "exp_avg", "exp_avg_sq")  # the kinds that a training checkpoint holds
EMA = "ema"  # one more where weights are averaged over the steps: what exports hold in the place of "param"


@dataclass(frozen=True)
class Slice:
    """A rectangular part of a tensor in the published layout: published[offset : offset + tensor.shape]."""

    kind: str  # "param" | "exp_avg" | "exp_avg_sq" | "ema" | "grad" | "output"
    name: str  # published name
    shape: tuple[int, ...]  # of the whole published tensor
    offset: tuple[int, ...]
    tensor: Tensor


class TensorSource(Protocol):
    """Where a backend reads tensors from: fresh initial values, a Hugging Face directory or a sharded checkpoint."""

    def read(
        self, kind: str, name: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
    ) -> Tensor:
        """published[offset : offset + extent] as a CPU tensor, in whatever dtype is stored. `shape` is the whole's.

        Raises UserError if the tensor is missing or has another shape.
        """


Accept = Callable[[float], bool]


def always(_loss: float) -> bool:
    """Update whatever the loss is."""
    return True


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports; the same numbers on every rank."""

    loss_sum: float  # over all supervised tokens of the global batch, in nats
    num_tokens: int  # supervised tokens of the global batch
    grad_norm: float  # before clipping, global
    bad_samples: tuple[int, ...] = ()  # ids of the samples in micro-batches without a finite loss, over all ranks
    bad_rank: int | None = None  # the first rank that saw one
    bad_tensors: tuple[str, ...] = ()  # whose gradients are not finite, where all losses are
    updated: bool = True  # False: what was asked for the loss did not want the step
    metrics: dict[str, Any] = field(default_factory=dict)  # more for metrics.jsonl


@dataclass(frozen=True)
class ForwardResult:
    """What `job=forward` needs. The last pipeline stage's first tensor-parallel rank holds the logits, others None."""

    logits: list[Tensor] | None  # for each batch: fp32 [B, S, vocab_size] on the CPU, padding of the vocabulary cut off
    loss_sum: float  # over all ranks
    num_tokens: int
    experts: list[dict[int, Tensor]] = field(default_factory=list)  # for each batch, by layer: int64 [B, S, k], chosen
    losses: dict[str, float] = field(default_factory=dict)  # besides the loss, over all ranks, in nats per token


class Backend(Protocol):
    """A model, its optimizer and its layout on this rank."""

    dp_rank: int
    dp_size: int
    parameters_total: int  # of the whole model, tied tensors counted once
    published: Mapping[str, tuple[int, ...]]  # the whole model's tensors by name, those of adapters included
    kernels: Mapping[str, str]  # operation and the implementation that was chosen for it, where there was a choice

    def train_step(self, batches: Sequence[Batch], lr: float, accept: Accept = always) -> StepResult:
        """Forward, backward and update over this rank's micro-batches of one global batch.

        `accept` is given the mean loss, on every rank the same, and decides whether there is an update.

        The loss is the sum over all supervised tokens of the global batch divided by their number. If the loss or the
        gradient norm is not finite, nothing is updated.
        """

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Loss sum in nats and number of supervised tokens, summed over all ranks; the same on every rank."""

    def forward(self, batches: Sequence[Batch], grad: bool) -> ForwardResult:
        """Logits of this rank's micro-batches, and the loss over all ranks. Collective.

        With `grad`, the gradients of the mean loss over all supervised tokens are kept for `state(("grad",))`; the
        backend must have been built with mode "forward".
        """

    def state(self, kinds: Sequence[str]) -> Iterator[Slice]:
        """This rank's share of the model's tensors; over all ranks every element of every tensor comes exactly once.

        "param" is the fp32 main copy where there is one. `exp_avg`, `exp_avg_sq` have the parameters' names and
        shapes. "grad" comes after `forward(..., grad=True)`. Collective: all ranks iterate together. Tensors may be
        views that the next step overwrites.
        """

    def load_state(self, source: TensorSource, kinds: Sequence[str]) -> None:
        """Fill the model (and its optimizer) from a source, in place. Collective."""

    def optimizer_step(self) -> int:
        """Updates made so far (Adam's step count)."""

    def set_optimizer_step(self, step: int) -> None:
        """Continue counting from here, after `load_state`."""

    def modules(self) -> dict[str, nn.Module]:
        """This rank's modules whose outputs are worth watching, by published name (`engine.inspect.modules`)."""


def trained_kinds(backend: Backend) -> tuple[str, ...]:
    """What a training checkpoint of this backend holds."""
    return (*TRAINED, EMA) if getattr(backend, "averages", False) else TRAINED


def unit_of(backend: Backend) -> str:
    """What a backend's losses are means over: tokens, or samples."""
    return getattr(backend, "unit", "tokens")


class Builder(Protocol):
    """`engine.backends.<name>.build`.

    mode "train": model and optimizer. "forward": fp32-exact model with gradients kept whole, no optimizer. "weights":
    only holds parameters in `dtype` (convert). The process group is up already; weights are empty until `load_state`.
    """

    def __call__(self, run: Run, family: Family, hardware: Hardware, mode: str) -> Backend: ...
