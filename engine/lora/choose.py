"""What the controller makes of `task.lora`: the base of an adapter to go on from, and its settings. Free of torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from engine.architecture import find_weights
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.lora.adapter import base_of, is_adapter, place_adapters, read_adapter, settings_of
from engine.lora.names import linear_layers, not_in_reference
from engine.schema import Run

SETTING = "task.lora.adapter"
BLOCK, BLOCKS = 1 << 12, 64  # bytes of each file that are compared, and how often


def choose_base(run: Run) -> None:
    """Let the adapter that a run goes on from say which weights it adapts. UserError for one of other weights."""
    if run.task.name != "lora" or run.job.name != "train" or run.task.lora.adapter is None:
        return
    folder = find_weights(run.task.lora.adapter, SETTING)
    if not is_adapter(folder):
        raise UserError(
            f"{SETTING}={run.task.lora.adapter}: no adapter there, but a model; it should be a directory "
            "with adapter_config.json"
        )
    run.task.lora.adapter = str(folder)
    if run.model.weights is None:
        run.model.weights = str(base_of(folder))
        return
    own, given = Path(read_adapter(folder).base).expanduser(), find_weights(run.model.weights)
    if own.is_dir() and not same_weights(own.resolve(), given):
        raise UserError(
            f"{folder}: an adapter for another base, {own}, and model.weights={run.model.weights} is not that; "
            "leave model.weights out"
        )


def choose_settings(run: Run, family: Family, named: Collection[str]) -> None:
    """Fill `task.lora` from the adapter or checkpoint that a run goes on from, and check it. UserError."""
    resume, lora = run.checkpoint.resume, run.task.lora
    if resume is not None and is_adapter(Path(resume)) != (run.task.name == "lora"):
        held = "adapters" if is_adapter(Path(resume)) else "whole weights"
        raise UserError(f"checkpoint.resume={resume}: it holds {held}, which task={run.task.name} does not go on with")
    if run.task.name != "lora" or run.job.name != "train":
        return
    weight_map, origin = load_dotted(family.weights)(run.model), resume or lora.adapter
    if origin is not None:
        places = place_adapters(read_adapter(Path(origin)), weight_map)
        for key, value in settings_of(Path(origin), places, weight_map.adaptable).items():
            given = getattr(lora, key)
            if f"task.lora.{key}" in named and (set(given) if key == "targets" else given) != (
                set(value) if key == "targets" else value
            ):
                raise UserError(f"task.lora.{key}={given}: the adapter {origin} has {value}; leave {key} out")
            setattr(lora, key, value)
    layers = linear_layers(weight_map.adaptable, lora.targets)
    if run.backend == "native" and (lost := not_in_reference(weight_map, layers)):
        raise UserError(
            f"task=lora: {lost[0]} is not a linear layer of its own in the reference model (experts are held together, "
            "and some layers are published in another form); use backend=megatron, or name other task.lora.targets"
        )
    if run.parallelism.etp > 1 and (routed := next((layer for layer in layers if ".experts." in layer), None)):
        raise UserError(
            f"parallelism.etp={run.parallelism.etp}: adapters of experts ({routed}) need parallelism.etp=1; or name "
            "other task.lora.targets"
        )


def same_weights(a: Path, b: Path) -> bool:
    """Whether two folders hold the same weights, as far as a look at every file's size and some of its bytes tells."""
    if a == b:
        return True
    files = [{path.name: path for path in sorted(folder.glob("*.safetensors"))} for folder in (a, b)]
    return files[0].keys() == files[1].keys() and all(_alike(files[0][name], files[1][name]) for name in files[0])


def _alike(a: Path, b: Path) -> bool:
    size = a.stat().st_size
    if size != b.stat().st_size:
        return False
    with a.open("rb") as one, b.open("rb") as other:
        for block in range(BLOCKS):
            place = block * max(0, size - BLOCK) // max(1, BLOCKS - 1)
            one.seek(place)
            other.seek(place)
            if one.read(BLOCK) != other.read(BLOCK):
                return False
    return True
