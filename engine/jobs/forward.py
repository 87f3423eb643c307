"""`job=forward`: the parity door. A batch in, the model's outputs, loss and gradients out, in published names.

`data.inputs` is a safetensors file with the names of the reference's forward: `input_ids` [B, S] int64 and optionally
`attention_mask` [B, S] (1 keeps; padding at either end of a row), `position_ids` [B, S] (a restart at 0 begins a packed
document) and `labels` [B, S] (not shifted; -100 is ignored). `outputs.safetensors` in the run folder holds `logits`
[B, S, vocab_size] in fp32 (zeros where the mask is 0), `loss` (mean over supervised tokens, if labels are given; 0 if
none is supervised), `mtp_loss` where `mtp.loss_weight` asks for it and, with `grad=true`, `grad.<published name>` (of
the loss, with the weighted one of multi-token prediction). Models with experts also give `experts.<layer>`
[B, S, k] int64, the experts of each token, and take tensors of these names: then routers do not choose.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.base import Backend, ForwardResult, Slice
from engine.checkpoint.sharded import ShardedSource, save_sharded
from engine.context import Context
from engine.data.batch import IGNORE, Batch, rows_to_batch
from engine.errors import UserError
from engine.family import load_dotted
from engine.jobs.start import load_start_weights
from engine.moe import replay
from engine.words import some

KNOWN = ("input_ids", "attention_mask", "position_ids", "labels")


def run(context: Context) -> None:
    """Write `outputs.safetensors`."""
    settings = context.run
    if context.family.inputs:
        load_dotted("engine.jobs.forward_policy:run")(context)
        return
    inputs = read_inputs(Path(settings.data.inputs), settings.model.vocab_size, settings.model)
    _check_balancing(settings.model, inputs)
    if settings.grad and "labels" not in inputs:
        raise UserError(f"grad=true needs a loss, and {settings.data.inputs} holds no 'labels'")
    backend = context.build_backend("forward")
    load_start_weights(context, backend)
    rows = inputs["input_ids"].shape[0]
    batches = split(inputs, backend.dp_rank, backend.dp_size, settings.data.micro_batch_size)
    result = backend.forward(batches, settings.grad)
    parts = context.run_dir / "parts"
    shape = (rows, inputs["input_ids"].shape[1], settings.model.vocab_size)
    save_sharded(parts, _slices(backend, result, batches, shape, settings.grad), {}, context.comm)
    if context.rank == 0:
        out = context.run_dir / "outputs.safetensors"
        outputs = _collect(ShardedSource(parts), inputs, shape)
        if "labels" in inputs:
            loss = result.loss_sum / max(1, result.num_tokens)
            if not result.num_tokens:
                context.log("no label is supervised (all are -100, masked or last in their row): the loss is 0")
            outputs["loss"] = torch.tensor(loss, dtype=torch.float32)
            outputs |= {name: torch.tensor(value, dtype=torch.float32) for name, value in result.losses.items()}
            context.result |= {"loss": loss, **result.losses}
        save_file(outputs, out)
        shutil.rmtree(parts)
        context.result["outputs"] = str(out)
        context.log(f"wrote {out}: {', '.join(sorted(outputs)[-3:])} ({len(outputs)} tensors)")
    context.comm.barrier()


def _check_balancing(model: Any, inputs: dict[str, Tensor]) -> None:
    """The reference leaves padding out of its balancing loss; here only whole rows can be left out."""
    if getattr(model, "output_router_logits", False) and "attention_mask" in inputs:
        raise UserError(
            "model.output_router_logits=true gives a loss over all tokens of a row, and there is an attention_mask; "
            "leave one of them out"
        )


def read_inputs(path: Path, vocab_size: int, model: Any = None) -> dict[str, Tensor]:
    """The batch of `data.inputs`, checked."""
    try:
        inputs = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"data.inputs={path} is not a readable safetensors file: {error}") from None
    decisions = {}
    mixture = model.mixture() if model else None
    if mixture:
        decisions = {name: inputs.pop(name) for name in list(inputs) if replay.layer_of(name) is not None}
    if unknown := sorted(set(inputs) - set(KNOWN)):
        raise UserError(f"{path} holds {some(unknown)}; job=forward reads {', '.join(KNOWN)}")
    if "input_ids" not in inputs or inputs["input_ids"].dim() != 2 or inputs["input_ids"].numel() == 0:
        raise UserError(f"{path} needs 'input_ids' of shape [rows, tokens], at least one of each")
    shape = inputs["input_ids"].shape
    if wrong := [f"{k} {list(t.shape)}" for k, t in inputs.items() if t.shape != shape]:
        raise UserError(f"{path}: {', '.join(wrong)} should have the shape of input_ids, {list(shape)}")
    if floats := [f"{k} {t.dtype}" for k, t in inputs.items() if t.is_floating_point() or t.is_complex()]:
        raise UserError(f"{path}: {', '.join(floats)} should be whole numbers (int64)")
    inputs = {name: tensor.long() for name, tensor in inputs.items()}
    for name in ("input_ids", "labels"):
        if name in inputs and _outside(inputs[name], vocab_size, ignore=name == "labels"):
            raise UserError(f"{path}: {name} must lie in [0, {vocab_size}) (vocab_size)")
    _check_mask(inputs, path)
    _check_positions(inputs, path)
    return inputs | (replay.check(decisions, path, tuple(shape), mixture) if decisions else {})


def _outside(tokens: Tensor, vocab_size: int, ignore: bool) -> bool:
    bad = (tokens < 0) | (tokens >= vocab_size)
    return bool((bad & (tokens != IGNORE)).any() if ignore else bad.any())


def _check_mask(inputs: dict[str, Tensor], path: Path) -> None:
    """Only padding at the ends of a row can be told from tokens without an S x S mask."""
    if "attention_mask" not in inputs:
        return
    kept = inputs["attention_mask"] != 0
    changes = (kept[:, 1:] != kept[:, :-1]).sum(1)
    holes = (changes > 2) | ((changes == 2) & kept[:, 0])
    if bool(holes.any()):
        raise UserError(f"{path}: attention_mask may be 0 only at the beginning and the end of a row")


def _check_positions(inputs: dict[str, Tensor], path: Path) -> None:
    """Positions count up by one, or restart at 0 with a packed document.

    A row may begin anywhere, since rotary angles depend on differences alone. Other jumps would need a mask.
    """
    if "position_ids" not in inputs:
        return
    positions = inputs["position_ids"]
    kept = inputs.get("attention_mask", torch.ones_like(positions)) != 0
    jumps = (positions[:, 1:] != positions[:, :-1] + 1) & (positions[:, 1:] != 0) & kept[:, 1:] & kept[:, :-1]
    if bool(jumps.any()):
        row, column = jumps.nonzero()[0].tolist()
        before, after = positions[row, column : column + 2].tolist()
        raise UserError(
            f"{path}: position_ids goes from {before} to {after} in row {row}, at token {column + 1}; it must count up "
            "by one, or restart at 0 where a packed document begins"
        )
    if bool(((positions < 0) & kept).any()):
        raise UserError(f"{path}: position_ids holds numbers below 0")


def split(inputs: dict[str, Tensor], dp_rank: int, dp_size: int, micro_batch_size: int) -> list[Batch]:
    """This rank's micro-batches; every rank gets as many, filled up with rows without labels (sample id -1)."""
    rows, length = inputs["input_ids"].shape
    size = min(micro_batch_size, -(-rows // dp_size))
    count = -(-rows // (size * dp_size))
    labels = torch.full((rows, length), IGNORE)
    if "labels" in inputs:
        labels[:, :-1] = inputs["labels"][:, 1:]
    starts = document_starts(inputs)
    if "attention_mask" in inputs:
        kept = inputs["attention_mask"] != 0
        labels[~kept] = IGNORE
    decisions = {layer: x for name, x in inputs.items() if (layer := replay.layer_of(name)) is not None}
    batches = []
    for micro in range(count):
        first = (dp_rank * count + micro) * size
        index = [i if i < rows else -1 for i in range(first, first + size)]
        take = torch.tensor([max(i, 0) for i in index])
        batch_labels = labels[take].clone()
        batch_labels[torch.tensor(index) < 0] = IGNORE
        batch = rows_to_batch(inputs["input_ids"][take], batch_labels, starts[take], index)
        batch.experts = {layer: chosen[take] for layer, chosen in decisions.items()}
        batches.append(batch)
    return batches


def document_starts(inputs: dict[str, Tensor]) -> Tensor:
    """bool [B, S]: where `position_ids` restart at 0, and where padding begins or ends."""
    starts = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    if "position_ids" in inputs:
        starts |= inputs["position_ids"] == 0
    if "attention_mask" in inputs:
        kept = inputs["attention_mask"] != 0
        starts[:, 1:] |= kept[:, 1:] != kept[:, :-1]
    return starts


def _slices(
    backend: Backend, result: ForwardResult, batches: list[Batch], shape: tuple[int, int, int], grad: bool
) -> Iterator[Slice]:
    for batch, logits in zip(batches, result.logits or [], strict=False):
        for row, sample in enumerate(batch.sample_ids):
            if sample >= 0:
                yield Slice("output", "logits", shape, (sample, 0, 0), logits[row : row + 1])
    for batch, chosen_by_layer in zip(batches, result.experts, strict=False):
        for layer, chosen_BSk in chosen_by_layer.items():
            whole = (*shape[:2], chosen_BSk.shape[-1])
            for row, sample in enumerate(batch.sample_ids):
                if sample >= 0:
                    yield Slice("output", f"experts.{layer}", whole, (sample, 0, 0), chosen_BSk[row : row + 1])
    if grad:
        yield from backend.state(("grad",))


def _collect(source: ShardedSource, inputs: dict[str, Tensor], shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Whole tensors out of the ranks' slices."""
    outputs = {}
    for kind, name, whole in source.tensors():
        key = name if kind == "output" else f"grad.{name}"
        outputs[key] = source.read(kind, name, whole, (0,) * len(whole), whole).contiguous()
    if "attention_mask" in inputs:
        outputs["logits"][inputs["attention_mask"] == 0] = 0
    return outputs
