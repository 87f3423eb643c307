"""`job=convert`: published weights to a sharded checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from engine.backends.base import Slice, TensorSource
from engine.checkpoint.card import TOKENIZER, Card, tokenizer_files
from engine.checkpoint.config import DTYPE_OF
from engine.checkpoint.headers import by_layer
from engine.checkpoint.hf import export, export_hf
from engine.checkpoint.index import load_index
from engine.checkpoint.origin import make_card
from engine.checkpoint.paths import find_checkpoint, step_folder
from engine.checkpoint.sharded import save_sharded
from engine.checkpoint.sources import HFSource, open_weights
from engine.checkpoint.tensor_file import DTYPES
from engine.context import Context
from engine.errors import UserError
from engine.family import load_dotted
from engine.lora.sources import Merged

# What a model held in this precision gives back bit for bit.
# (FP8 in blocks is what its scales make of it; an export gives it in bf16 anyway.)
EXACT = {"fp32": {"F32", "BF16", "F16", "F8_E4M3"}, "bf16": {"BF16", "F8_E4M3"}}


def run(context: Context) -> None:
    """Convert in the direction of `job.to`."""
    if context.run.job.to == "hf":
        to_hf(context)
    elif context.run.job.to == "sharded":
        to_sharded(context)
    else:
        raise UserError(f"job.to={context.run.job.to}: should be hf or sharded")


def to_hf(context: Context) -> None:
    """A checkpoint of ours to a Hugging Face directory. No model is built: the slices are put together."""
    run = context.run
    if not run.job.source:
        raise UserError("job=convert job.to=hf needs job.source: a checkpoint or a run folder")
    if context.world > 1:
        context.start_distributed()
    if run.job.merge:
        merge(context, Path(run.job.source))
        return
    source = find_checkpoint(Path(run.job.source))
    family = load_index(source).family
    if family != run.family:
        raise UserError(f"{source}: holds a model of the family '{family}', this is '{run.family}'")
    out = Path(run.job.out) if run.job.out else context.run_dir / "hf"
    dtype = run.checkpoint.export_dtype
    export_hf(source, out, DTYPE_OF[dtype] if dtype else None, context.comm, replace=run.job.out is None)
    _done(context, "hf", out)


def merge(context: Context, folder: Path) -> None:
    """An adapter and the base that it names to a Hugging Face directory, in the base's names and dtypes."""
    run = context.run
    model = replace(run.model, weights=str(folder))
    source, card = open_weights(folder, context.family, model), make_card(replace(run, model=model), context.family)
    assert isinstance(source, Merged), "the controller takes adapters only"
    own = next((place for place in (folder / TOKENIZER, folder) if tokenizer_files(place)), card.tokenizer)
    out, dtype = Path(run.job.out) if run.job.out else context.run_dir / "hf", run.checkpoint.export_dtype
    card = replace(card, tokenizer=own)
    export(source, card, out, DTYPE_OF[dtype] if dtype else None, context.comm, replace=run.job.out is None)
    _done(context, "hf", out)


def to_sharded(context: Context) -> None:
    """A Hugging Face directory (or a checkpoint of another layout) to a checkpoint in this run's layout."""
    run = context.run
    if not run.model.weights:
        raise UserError("job=convert job.to=sharded needs model.weights: a Hugging Face directory")
    source = open_weights(Path(run.model.weights), context.family, run.model)
    card = make_card(run, context.family)
    _check_lossless(context, source, card)
    if context.world == 1:
        slices = whole_tensors(context, source)
    else:
        backend = context.build_backend("weights")
        backend.load_state(source, ("param",))
        slices = backend.state(("param",))
    out = Path(run.job.out) if run.job.out else step_folder(context.run_dir, 0)
    save_sharded(out, slices, {"step": 0, "from": str(run.model.weights)}, context.comm, card)
    _done(context, "checkpoint", out)


def whole_tensors(context: Context, source: TensorSource) -> Iterator[Slice]:
    """What one process would hold of the model, a tensor at a time: a model need not fit its memory."""
    weight_map = load_dotted(context.family.weights)(context.run.model)
    held = DTYPES[DTYPE_OF[context.run.precision.name]]
    for name, shape in weight_map.published.items():
        tensor = source.read("param", name, shape, (0,) * len(shape), shape)
        dtype = torch.float32 if name in weight_map.buffers else held
        yield Slice("param", name, shape, (0,) * len(shape), tensor.to(dtype))


def _check_lossless(context: Context, source: TensorSource, card: Card) -> None:
    """UserError if a tensor has no place in the model, or a dtype that the model's precision would round."""
    run = context.run
    if isinstance(source, HFSource):
        left = [n for n in source.shapes if n not in card.stored and not n.endswith("rotary_emb.inv_freq")]
        if left:
            raise UserError(f"{source.folder}: {run.family} has no place for {', '.join(by_layer(left))}")
    # Buffers are fp32 in any precision.
    lost = sorted({dtype for n, dtype in card.stored.items() if n not in card.buffers} - EXACT[run.precision.name])
    if lost:
        raise UserError(
            f"{run.model.weights}: holds {', '.join(lost)} tensors, which precision={run.precision.name} would round; "
            "convert with precision=fp32"
        )


def _done(context: Context, what: str, out: Path) -> None:
    context.result[what] = str(out)
    context.log(f"wrote {out}")
