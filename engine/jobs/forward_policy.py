"""`job=forward` of a family with an objective of its own: the same door as for language models, with its own tensors.

The family's `inputs` reads `data.inputs`. `outputs.safetensors` holds what its objective's `outputs` gives, `loss`
(the mean over samples) where the inputs have what a loss needs and, with `grad=true`, `grad.<published name>`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.base import Backend, Slice
from engine.checkpoint.sharded import ShardedSource, save_sharded
from engine.context import Context
from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.family import load_dotted
from engine.jobs.start import load_start_weights


def run(context: Context) -> None:
    """Write `outputs.safetensors`."""
    settings, path = context.run, Path(str(context.run.data.inputs))
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"data.inputs={path} is not a readable safetensors file: {error}") from None
    whole: PolicyBatch = load_dotted(str(context.family.inputs))(tensors, settings.model, path)
    if settings.grad and whole.time is None:
        raise UserError(f"grad=true needs a loss, and {path} holds no 'actions' and 'time'")
    backend = context.build_backend("forward")
    load_start_weights(context, backend)
    rows = whole.state.shape[0]
    batches = split(whole, rows, backend.dp_rank, backend.dp_size, settings.data.micro_batch_size)
    outputs = backend.outputs(batches)
    loss = None
    if whole.time is not None:
        result = backend.forward(batches, settings.grad)
        loss = result.loss_sum / max(1, result.num_tokens)
    parts = context.run_dir / "parts"
    save_sharded(parts, _slices(backend, outputs, batches, rows, settings.grad), {}, context.comm)
    if context.rank == 0:
        _write(context, parts, loss)
    context.comm.barrier()


def split(whole: PolicyBatch, rows: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[PolicyBatch]:
    """This rank's micro-batches; every rank gets as many, filled up with samples that do not count (id -1)."""
    size = min(micro_batch_size, -(-rows // dp_size))
    count = -(-rows // (size * dp_size))
    batches = []
    for micro in range(count):
        first = (dp_rank * count + micro) * size
        numbers = [number if number < rows else -1 for number in range(first, first + size)]
        batch = whole.take([max(0, number) for number in numbers])
        batch.sample_ids = numbers
        batches.append(batch)
    return batches


def _slices(
    backend: Backend, outputs: list[dict[str, Tensor]], batches: list[PolicyBatch], rows: int, grad: bool
) -> Iterator[Slice]:
    for batch, found in zip(batches, outputs, strict=True):
        for name, values in found.items():
            for row, sample in enumerate(batch.sample_ids):
                if sample >= 0:
                    shape, rest = (rows, *values.shape[1:]), (0,) * (values.dim() - 1)
                    yield Slice("output", name, shape, (sample, *rest), values[row : row + 1])
    if grad:
        yield from backend.state(("grad",))


def _write(context: Context, parts: Path, loss: float | None) -> None:
    source, out = ShardedSource(parts), context.run_dir / "outputs.safetensors"
    outputs = {}
    for kind, name, whole in source.tensors():
        key = name if kind == "output" else f"grad.{name}"
        outputs[key] = source.read(kind, name, whole, (0,) * len(whole), whole).contiguous()
    if loss is not None:
        outputs["loss"] = torch.tensor(loss, dtype=torch.float32)
        context.result["loss"] = loss
    save_file(outputs, out)
    shutil.rmtree(parts)
    context.result["outputs"] = str(out)
    context.log(f"wrote {out}: {', '.join(sorted(outputs)[:3])} ({len(outputs)} tensors)")
