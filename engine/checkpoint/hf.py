"""Exporting a sharded checkpoint as a complete Hugging Face directory, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import EMA
from engine.checkpoint.agree import Alone, Ranks, agree, attempt
from engine.checkpoint.card import ADAPTER, CONFIG, POLICY, Card, read_card, sync_folder, write_synced
from engine.checkpoint.config import DTYPE_OF, with_dtype
from engine.checkpoint.dequantise import to_fp8
from engine.checkpoint.headers import INDEX as HF_INDEX
from engine.checkpoint.headers import SINGLE
from engine.checkpoint.index import Shape
from engine.checkpoint.published_fp8 import FP8_DTYPE, SCALE, Fp8, config_with, fp8_of
from engine.checkpoint.quantised import CONFIG_KEY, grid
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.swap import put, recover, unfinished
from engine.checkpoint.tensor_file import DTYPES, TensorFile, header_room
from engine.errors import UserError
from engine.lora.adapter import MODEL as ADAPTER_MODEL
from engine.lora.export import PeftForm, in_pefts_form
from engine.lora.names import PREFIX
from engine.lora.sources import Merged
from engine.metrics.text import memory

if TYPE_CHECKING:
    from engine.context import Context

MAX_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}
Source = ShardedSource | Merged | PeftForm


@dataclass(frozen=True)
class Planned:
    """One tensor of the export."""

    name: str
    source: str  # the checkpoint's name for it; another one where it repeats a tied tensor
    shape: Shape
    dtype: str
    quantised: bool = False  # the values or, under `name` + SCALE, the scales of a matrix of `whole`
    whole: Shape = ()
    transposed: bool = False  # the source's matrix has rows and columns changed over

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def export_run(context: Context, checkpoint: Path) -> Path:
    """Write `hf/` of a run from one of its checkpoints. By one rank."""
    dtype = context.run.checkpoint.export_dtype
    return export_hf(checkpoint, context.run_dir / "hf", DTYPE_OF[dtype] if dtype else None, replace=True)


def export_hf(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    comm: Ranks | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = False,
) -> Path:
    """Write a checkpoint's parameters, config, generation config and tokenizer as a Hugging Face directory. Collective.

    Names and dtypes are those that the checkpoint's card records (so an original comes back bit for bit), unless
    `dtype` (F32, BF16, F16) asks for another one, which buffers are not given. Shards are dealt out over the ranks.
    The folder appears under its name when it is complete. UserError if it is there already and `replace` is false, or
    if the disk is full.
    """
    card = read_card(checkpoint)
    if CONFIG not in card.texts:
        raise UserError(f"{checkpoint}: has no {CONFIG}, so it cannot become a Hugging Face directory")
    source: ShardedSource | PeftForm = ShardedSource(checkpoint)
    if ADAPTER in card.texts:
        source, card = in_pefts_form(ShardedSource(checkpoint), card)
    return export(source, card, out, dtype, comm, max_shard_bytes, replace)


def export(
    source: Source,
    card: Card,
    out: Path,
    dtype: str | None = None,
    comm: Ranks | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = False,
) -> Path:
    """Write a source's parameters as the card says, adapters in PEFT's format; the rest is as `export_hf` has it."""
    comm = comm or Alone()
    shapes = source.index.shapes() if isinstance(source, ShardedSource) else source.shapes
    fp8 = fp8_of(card, shapes) if dtype == FP8_DTYPE else None
    planned = plan(source, card, dtype, fp8)
    adapters = ADAPTER in card.texts
    shards = [planned] if adapters or _in_one_file(card) else plan_shards(planned, max_shard_bytes)
    names = [ADAPTER_MODEL] if adapters else shard_names(len(shards))
    temporary = unfinished(out)
    agree(comm, attempt(lambda: _prepare(out, temporary, shards, replace)) if comm.rank == 0 else None)
    mine = list(zip(names, shards, strict=True))[comm.rank :: comm.world]
    error = attempt(lambda: [write_shard(temporary / name, source, shard, fp8) for name, shard in mine])
    try:
        agree(comm, error)
        written = replace_texts(card, fp8)
        agree(
            comm,
            attempt(lambda: _complete(out, temporary, written, dtype, names, shards)) if comm.rank == 0 else None,
        )
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def _in_one_file(card: Card) -> bool:
    """Whether the weights are published as one file whatever their size: lerobot reads no other for its policies."""
    return bool(json.loads(card.texts.get(CONFIG, "{}")).get("type"))


def replace_texts(card: Card, fp8: Fp8 | None) -> Card:
    """The card with a config.json that says how this export is quantised, where that is not what it says."""
    text = card.texts.get(CONFIG)
    if text is None or (fp8 is None and CONFIG_KEY not in json.loads(text)):
        return card
    changed = dataclasses.replace(card, texts=card.texts | {CONFIG: config_with(text, fp8)}, tokenizer=None)
    changed.files = card.files
    return changed


def plan(source: Source, card: Card, dtype: str | None, fp8: Fp8 | None = None) -> list[Planned]:
    """What to write, in the published order. UserError if the checkpoint lacks a tensor."""
    shapes = source.index.shapes() if isinstance(source, ShardedSource) else source.shapes
    stored = card.stored
    if not stored and isinstance(source, ShardedSource):
        stored = {name: source.dtype_of("param", name) for name in shapes}
    back = {target: alias for alias, target in card.aliases.items() if alias in shapes}
    planned = []
    for name, own in stored.items():
        candidates = (name, card.aliases.get(name), back.get(name), name.removeprefix(PREFIX))
        found = next((c for c in candidates if c in shapes), None)
        if found is None:
            raise UserError(f"{source.folder}: holds no param '{name}'")
        if fp8 and name in fp8.names:
            whole = shapes[found]
            planned.append(Planned(name, found, whole, FP8_DTYPE, True, whole))
            planned.append(Planned(name + SCALE, found, grid(whole, fp8.block), "F32", True, whole))
            continue
        rounded = dtype and DTYPES[own].is_floating_point and name not in card.buffers
        as_published = fp8 and FP8_DTYPE in card.stored.values()  # the rest of it is then, too
        turned = name in card.transposed
        asked = own if as_published else "BF16" if fp8 or (own == FP8_DTYPE and not dtype) else dtype
        kind = asked if rounded or own == FP8_DTYPE else own
        planned.append(Planned(name, found, shapes[found][:: -1 if turned else 1], kind, transposed=turned))
    return planned


def plan_shards(planned: list[Planned], max_bytes: int) -> list[list[Planned]]:
    """Consecutive tensors of at most `max_bytes` a shard, unless one alone is larger."""
    shards: list[list[Planned]] = [[]]
    for tensor in planned:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > max_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_shard(path: Path, source: Source, shard: list[Planned], fp8: Fp8 | None = None) -> None:
    """One file; larger elements come first, so that every tensor is aligned."""
    ordered = sorted(shard, key=lambda t: -DTYPES[t.dtype].itemsize)
    metadata = METADATA | (source.metadata if isinstance(source, PeftForm) else {})
    room = header_room([(t.name, t.dtype, t.shape) for t in ordered], metadata)
    file = TensorFile(path, room, metadata)
    try:
        for t in ordered:
            whole = t.whole or t.shape[:: -1 if t.transposed else 1]
            tensor = source.read(_kind_of(source, t.source), t.source, whole, (0,) * len(whole), whole)
            tensor = tensor.t().contiguous() if t.transposed else tensor
            if t.quantised and fp8:
                values, scales = to_fp8(tensor, fp8.block, fp8.power_of_two)
                tensor = values if t.dtype == FP8_DTYPE else scales
            file.add(t.name, tensor.to(DTYPES[t.dtype]))
        file.close()
    finally:
        file.abandon()


def _kind_of(source: Source, name: str) -> str:
    """The average of a tensor where the run kept one."""
    averaged = isinstance(source, ShardedSource) and name in source.index.tensors.get(EMA, {})
    return EMA if averaged else "param"


def _prepare(out: Path, temporary: Path, shards: list[list[Planned]], replace: bool) -> None:
    if replace:
        recover(out)
    if not replace and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    needed, free = sum(t.nbytes for shard in shards for t in shard), shutil.disk_usage(out.parent).free
    if needed > free:
        raise UserError(f"no room for {out}: it needs {memory(needed)} and {memory(free)} are free")
    temporary.mkdir()


def _complete(
    out: Path, temporary: Path, card: Card, dtype: str | None, names: list[str], shards: list[list[Planned]]
) -> None:
    if len(names) > 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(t.nbytes for shard in shards for t in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_synced(temporary / HF_INDEX, json.dumps(index, indent=2) + "\n")
    # PEFT's directories leave the config to the base that they name; a policy's numbers are those of its own data.
    adapter = {name: card.texts[name] for name in (ADAPTER, *POLICY) if name in card.texts}
    texts = adapter if ADAPTER in card.texts else card.texts
    for name, text in texts.items():
        write_synced(temporary / name, with_dtype(text, dtype) if dtype and name == CONFIG else text)
    card.write_tokenizer(temporary)
    sync_folder(temporary)
    put(temporary, out)
