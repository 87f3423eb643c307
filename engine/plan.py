"""From words to a run that can start: compose, read the weights' architecture, check, resolve. Touches no file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.architecture import CONFIG, adopt, check_tensors, differences, find_weights, read_architecture
from engine.checkpoint.card import TOKENIZER, tokenizer_files
from engine.checkpoint.index import STATE, read_json
from engine.checkpoint.paths import CHECKPOINTS, find_checkpoint, is_checkpoint, newest
from engine.checks import check
from engine.compose import Composition, compose, family_folder
from engine.errors import UserError
from engine.family import Family, load_family
from engine.freeze import load_run
from engine.layout import check_layout
from engine.resolve import resolve
from engine.rundir import new_run_id, run_folder
from engine.schema import Run
from hardware import registry
from hardware.base import Hardware, HardwareError


@dataclass(frozen=True)
class Plan:
    """A run that is ready to be frozen."""

    run: Run
    family: Family
    hardware: Hardware
    resuming: bool = False
    notes: tuple[str, ...] = ()  # for the user, nothing wrong


def plan(name: str, overrides: list[str]) -> Plan:
    """All that the controller does before it touches the disk. UserError, one mistake a line."""
    family = load_family(name)
    composition = compose(family, overrides)
    try:
        hardware = _hardware(composition.run)
    except HardwareError as error:
        raise UserError(str(error)) from None
    if composition.run.hardware.name == "auto" and _has_tune(family, hardware.name):
        composition = compose(family, [*overrides, f"hardware={hardware.name}"])
    run = composition.run
    run.hardware.name = hardware.name
    check(run, family, composition.named)
    notes = _take_weights(run, family, composition)
    resuming = run.checkpoint.resume is not None
    if resuming:
        _take_resume(run, composition.named)
    run = resolve(run, _devices(hardware), new_run_id())
    check_layout(run)
    if run.checkpoint.resume:
        notes += _changed_settings(run, Path(run.checkpoint.resume))
    if run.job.name in ("train", "prepare"):
        _check_data(run)
    return Plan(run, family, hardware, resuming, tuple(notes))


def _hardware(run: Run) -> Hardware:
    """The plugin of this run. `launcher=print` starts nothing, so there the hardware need not be here."""
    if run.launcher.name == "print" and run.hardware.name != "auto":
        return registry.plugin(run.hardware.name)
    return registry.get(run.hardware.name)


def _has_tune(family: Family, hardware: str) -> bool:
    return (family_folder(family) / "tune" / f"{hardware}.yaml").is_file()


def _devices(hardware: Hardware) -> int:
    """Accelerators of this machine; none on a CPU, whose cores are no devices."""
    return 0 if hardware.device_type == "cpu" else hardware.detect().devices


def _take_weights(run: Run, family: Family, composition: Composition) -> list[str]:
    """Let a weights directory decide the architecture and the tokenizer, and check its tensors."""
    setting, path = "model.weights", run.model.weights
    if run.job.name == "convert" and run.job.to == "hf":
        setting, path = "job.source", run.job.source
    if path is None:
        return []
    folder = find_weights(path, setting)
    if setting == "job.source":
        folder = find_checkpoint(Path(path).expanduser().resolve())
    run.model = adopt(run.model, composition.named, family, folder, setting)
    if setting == "job.source":
        run.job.source = str(folder)
    else:
        run.model.weights = str(folder)
    check(run, family, published=folder / CONFIG)
    extra = check_tensors(folder, family, run.model)
    if setting == "job.source":
        return _unused_note(folder, extra)
    if run.job.name == "sample" and is_checkpoint(folder):
        raise UserError(
            f"model.weights={path}: a sharded checkpoint, and job=sample needs a Hugging Face directory; "
            f"job=convert job.source={path} makes one of it"
        )
    if run.data.tokenizer is None and run.job.name != "forward":
        run.data.tokenizer = _tokenizer_of(folder)
        _check_tokenizer(run, folder)
    return _unused_note(folder, extra)


def _unused_note(folder: Path, names: list[str]) -> list[str]:
    return [f"{folder} holds tensors that the model does not use: {', '.join(names)}"] if names else []


def _tokenizer_of(folder: Path) -> str | None:
    """Where the tokenizer of some weights lies: their vocabulary means nothing with another one."""
    return next((str(place) for place in (folder / TOKENIZER, folder) if tokenizer_files(place)), None)


def _check_tokenizer(run: Run, folder: Path) -> None:
    """Weights mean nothing with a vocabulary that is not theirs: a new one is trained only when it is asked for."""
    if run.data.tokenizer is not None:
        return
    if run.job.name == "sample":
        raise UserError(f"model.weights={folder}: there is no tokenizer in it, and job=sample needs one")
    if run.job.name in ("train", "prepare") and run.data.vocab_size is None:
        raise UserError(
            f"model.weights={folder}: there is no tokenizer in it; name theirs with data.tokenizer=DIR "
            "(data.vocab_size=N trains a new one, whose tokens mean nothing to these weights)"
        )


def _take_resume(run: Run, named: dict[str, str]) -> None:
    """Turn `checkpoint.resume` into the checkpoint it means, and find the run folder to go on in."""
    if run.checkpoint.resume == "auto":
        if run.run_id is None:
            raise UserError(
                "checkpoint.resume=auto: run_id=... says which run to continue; "
                f"checkpoint.resume={run.output_dir}/{run.family}/latest continues the newest"
            )
        found = newest(run_folder(run))
    else:
        found = find_checkpoint(Path(str(run.checkpoint.resume)).expanduser().resolve())
        if run.run_id is None:
            _continue_in(run, found, named)
    run.checkpoint.resume = str(found.resolve()) if found else None
    if found:
        _check_resumable(run, found)


def _continue_in(run: Run, checkpoint: Path, named: dict[str, str]) -> None:
    """Go on in the run folder that a checkpoint belongs to."""
    folder = checkpoint.parent.parent
    if checkpoint.parent.name != CHECKPOINTS or folder.parent.name != run.family:
        raise UserError(
            f"checkpoint.resume={checkpoint}: not inside a run folder of {run.family}; name the run with run_id=..."
        )
    home = folder.parent.parent
    if Path(run.output_dir).resolve() != home:
        if "output_dir" in named:
            raise UserError(
                f"checkpoint.resume={checkpoint}: not in output_dir={run.output_dir}; name the new run with run_id=..."
            )
        run.output_dir = str(home)
    run.run_id = folder.name


def _check_resumable(run: Run, checkpoint: Path) -> None:
    """A checkpoint continues the model it was made of, and only while steps are left."""
    family = load_family(run.family)
    saved = read_architecture(checkpoint, family)
    if differing := differences(run.model, saved):
        keys = ", ".join(f"{key} is {theirs}, this run has {mine}" for key, mine, theirs in differing)
        right = "its own keys" if saved.name == "custom" else f"model={saved.name}"
        raise UserError(
            f"checkpoint.resume={checkpoint}: a checkpoint of another architecture: {keys}; resume with {right}"
        )
    step: Any = read_json(checkpoint / STATE).get("step")
    if isinstance(step, int) and step > run.schedule.steps:
        raise UserError(
            f"checkpoint.resume={checkpoint}: it is at step {step} and schedule.steps={run.schedule.steps}; "
            "a run goes on with the settings it began with, so give those again, with more steps if you like"
        )


def _changed_settings(run: Run, checkpoint: Path) -> list[str]:
    """One note for each setting that bears on the numbers and is not what the resumed run had."""
    try:
        before = load_run(checkpoint.parent.parent / "config.yaml")
    except UserError:
        return []  # a checkpoint away from its run folder
    pairs = {
        f"{group}.{key}": (value, getattr(getattr(before, group), key))
        for group in ("optim", "schedule", "precision")
        for key, value in vars(getattr(run, group)).items()
    }
    return [
        f"{key} is {now}; the run that goes on had {then}"
        for key, (now, then) in pairs.items()
        if now != then and key != "schedule.steps"
    ]


def _check_data(run: Run) -> None:
    data = run.data
    if (data.name, data.path, data.tokenizer) == ("stdlib", None, None):
        return  # nothing in it is the user's, and listing the library takes a quarter of a second
    from engine.data.sources import check_paths

    check_paths(data)
