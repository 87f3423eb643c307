"""From words to a run that can start: compose, read the weights' architecture, check, resolve. Touches no file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from engine import mtp
from engine.architecture import CONFIG, adopt, check_tensors, find_weights
from engine.checkpoint import published_fp8
from engine.checkpoint.card import TOKENIZER, tokenizer_files
from engine.checkpoint.paths import find_checkpoint, is_checkpoint
from engine.checks import check
from engine.compose import Composition, compose, family_folder
from engine.data.sources import LEROBOT
from engine.errors import UserError
from engine.family import Family, load_family
from engine.layout import check_layout
from engine.lora.adapter import base_of, is_adapter
from engine.lora.choose import choose_base, choose_settings
from engine.optim import groups
from engine.plausible import doubts
from engine.resolve import resolve
from engine.resume import (
    Resumed,
    changed_settings,
    check_looks,
    continue_in,
    find_resumed,
    finished,
    kept_words,
    keys_of,
    take_checkpoint,
)
from engine.rewrites import rewritten
from engine.rundir import OVERRIDES, new_run_id, run_folder
from engine.schema import Run
from engine.words import counted
from hardware import registry
from hardware.base import Hardware, HardwareError
from hardware.host import usable_cores

RANKS_OF_A_CORE = 16


@dataclass(frozen=True)
class Plan:
    """A run that is ready to be frozen."""

    run: Run
    family: Family
    hardware: Hardware
    resuming: bool = False
    notes: tuple[str, ...] = ()  # for the user, nothing wrong
    words: tuple[str, ...] = ()  # what the run folder keeps, so that a resume takes it up again
    place: Path | None = None  # the run folder, if it was moved to where `output_dir` and `run_id` cannot say
    finished: bool = False  # resumed, with no step left to take


def plan(name: str, overrides: list[str]) -> Plan:
    """All that the controller does before it touches the disk. UserError, one mistake a line."""
    family = load_family(name)
    resumed = find_resumed(family, overrides)
    words = resumed.replay(overrides) if resumed else overrides
    composition = compose(family, words)
    family = family.of(composition.run.model.model_type)
    try:
        hardware = hardware_of(composition.run)
    except HardwareError as error:
        raise UserError(str(error)) from None
    if composition.run.hardware.name == "auto" and _has_tune(family, hardware.name):
        composition = compose(family, [*words, f"hardware={hardware.name}"])
    run = composition.run
    run.hardware.name = hardware.name
    check(run, family, composition.named)
    resuming = run.checkpoint.resume is not None
    place = continue_in(run, resumed, keys_of(overrides)) if resumed else None
    if resumed and resumed.checkpoint:
        take_checkpoint(run, family, resumed, composition)
        check_looks(run, resumed, keys_of(overrides))
        notes = []
    else:
        run.checkpoint.resume = None  # `auto`, with nothing there yet
        choose_base(run)
        notes = _take_weights(run, family, composition)
    family = family.of(run.model.model_type)
    choose_settings(run, family, composition.named)
    run = resolve(mtp.decide(run), accelerators(hardware), new_run_id(), compiles=hardware.supports("compile"))
    mtp.check(run, family)
    published_fp8.check(run, family)
    groups.check(run, family)
    run, changes = rewritten(run, hardware)
    notes = [*changes, *notes]
    try:
        hardware.configure(run)
    except HardwareError as error:
        raise UserError(str(error)) from None
    _check_processes(run, hardware)
    check_layout(run)
    if run.job.name in ("train", "prepare"):
        _check_data(run)
    own = resumed.own(overrides) if resumed else []
    if resumed:
        notes = [*_resume_notes(run, resumed, own), *notes]
    notes += doubts(run, family)
    done = finished(run, resumed, place or run_folder(run)) if resumed and resumed.checkpoint else False
    kept = tuple(kept_words([*own, *overrides]))
    return Plan(run, family, hardware, resuming, tuple(notes), kept, place, done)


def _resume_notes(run: Run, resumed: Resumed, own: list[str]) -> list[str]:
    notes = [f"goes on with the settings in {resumed.run_dir}/{OVERRIDES}"] if kept_words(own) else []
    return notes + (changed_settings(run, resumed.frozen) if resumed.frozen else [])


def hardware_of(run: Run) -> Hardware:
    """The plugin of this run. `launcher=print` starts nothing, so there the hardware need not be here."""
    if run.launcher.name == "print" and run.hardware.name != "auto":
        return registry.plugin(run.hardware.name)
    return registry.get(run.hardware.name)


def _has_tune(family: Family, hardware: str) -> bool:
    return (family_folder(family) / "tune" / f"{hardware}.yaml").is_file()


def accelerators(hardware: Hardware) -> int:
    """Accelerators of this machine; none on a CPU, whose cores are no devices."""
    return 0 if hardware.device_type == "cpu" else hardware.detect().devices


def _check_processes(run: Run, hardware: Hardware) -> None:
    """UserError for more ranks than processes of a machine without accelerators could ever share its cores."""
    ranks, most = run.launcher.nproc_per_node or 1, RANKS_OF_A_CORE * usable_cores()
    if run.launcher.name == "local" and not accelerators(hardware) and ranks > most:
        raise UserError(
            f"the layout needs {counted(ranks, 'process')} on this machine, which has "
            f"{counted(usable_cores(), 'core')} and no accelerator; "
            f"at most {most} would run (launcher=print shows the commands for other machines)"
        )


def _take_weights(run: Run, family: Family, composition: Composition) -> list[str]:
    """Let a weights directory decide the architecture and the tokenizer, and check its tensors."""
    setting, path = "model.weights", run.model.weights
    if run.job.name == "convert" and run.job.to == "hf":
        setting, path = "job.source", run.job.source
    if path is None:
        return []
    folder = find_weights(path, setting)
    if setting == "job.source" and not run.job.merge:
        folder = find_checkpoint(Path(path).expanduser().resolve())
    elif setting == "job.source" and not is_adapter(folder):
        raise UserError(f"job.merge=true: {folder} holds whole weights, no adapter; leave job.merge out")
    elif run.task.name == "lora" and run.job.name == "train" and is_adapter(folder):
        raise UserError(
            f"model.weights={path}: an adapter; task.lora.adapter={path} goes on with it, and it knows its base"
        )
    run.model = adopt(run.model, composition.named, family, folder, setting)
    if setting == "job.source":
        run.job.source = str(folder)
    else:
        run.model.weights = str(folder)
    family = family.of(run.model.model_type)
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
    places = (folder / TOKENIZER, folder, *([base_of(folder)] if is_adapter(folder) else []))
    return next((str(place) for place in places if tokenizer_files(place)), None)


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


def _check_data(run: Run) -> None:
    data = run.data if run.checkpoint.resume is None else dataclasses.replace(run.data, tokenizer=None)
    if data.name == LEROBOT and data.path is None and run.launcher.name == "print":
        return  # a layout may be looked at before there are demonstrations
    if (data.name, data.path, data.tokenizer, data.validation) == ("stdlib", None, None, None):
        return  # nothing in it is the user's, and listing the library takes a quarter of a second
    from engine.data.check import check_paths

    check_paths(data, getattr(run.model, "vocab_size", None))
