"""Going on with a run: which one, with whose settings, and what must be as it was. Free of torch.

A run folder keeps the words that its run was started with (`overrides.json`). Resuming takes all of them again, and
what the user names now goes first. What cannot go on is refused here, before anything in the run folder is touched.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.architecture import adopt, check_tensors, find_weights
from engine.checkpoint.card import TOKENIZER, tokenizer_files
from engine.checkpoint.headers import read_header
from engine.checkpoint.index import load_index
from engine.checkpoint.paths import CHECKPOINTS, find_checkpoint, newest
from engine.checkpoint.state import load_train_state
from engine.compose import Composition, compose
from engine.errors import UserError
from engine.family import Family
from engine.freeze import load_run
from engine.rundir import CONFIG, OVERRIDES, run_folder
from engine.schema import Run

# Of one start of a run, not of its settings.
NOT_KEPT = ("run_id", "checkpoint.resume", "launcher.node_rank")
ORIGINS = ("model.weights", "data.tokenizer")  # a checkpoint has its own
# All that must be known to find the run that goes on; the rest of a command line is read together with that run's.
ASKED = ("job", "run_id", "output_dir", "checkpoint.resume", *ORIGINS)
# What follows from the number of devices, and is chosen anew with the layout or the machine.
WITH_LAYOUT = {"parallelism": ("launcher.nproc_per_node",), "hardware": ("launcher.nproc_per_node",)}
NOTED = ("optim", "schedule", "precision")  # groups that bear on the numbers and may differ


@dataclass(frozen=True)
class Resumed:
    """A run that is gone on with. `checkpoint` is None where it had saved nothing yet."""

    asked: Run  # composed of the user's words about what to go on with, and no others
    run_dir: Path | None  # the folder of the run that goes on; None for a checkpoint away from its run
    checkpoint: Path | None
    words: list[str] = field(default_factory=list)  # what that run was started with
    frozen: Run | None = None  # what that came to

    @property
    def usual(self) -> bool:
        """Whether the folder lies where `output_dir` and `run_id` can say; one that was moved may not."""
        return self.run_dir is not None and self.run_dir.parent.name == self.asked.family

    def own(self, words: list[str]) -> list[str]:
        """The run's own words that these leave standing: a group that is chosen anew drops the run's values in it."""
        named = {_key(word) for word in words}
        dropped = {*named, *(key for group in named for key in WITH_LAYOUT.get(group, ()))}
        return [w for w in self.words if _key(w) not in dropped and _key(w).partition(".")[0] not in named]

    def replay(self, words: list[str]) -> list[str]:
        """What the run that goes on is composed of; its architecture comes from the checkpoint."""
        merged = [*self.own(words), *words]
        if self.usual:
            given = {_key(word) for word in words}
            merged = [w for w in merged if _key(w) != "output_dir" or "output_dir" in given]
        if self.checkpoint:
            merged = [w for w in merged if _key(w) not in ORIGINS] + [f"model.weights={self.checkpoint}"]
        return merged


def kept_words(words: list[str]) -> list[str]:
    """What a run folder keeps of the words of its run."""
    return [word for word in words if _key(word) not in NOT_KEPT]


def keys_of(words: list[str]) -> set[str]:
    """The keys and groups that words name."""
    return {_key(word) for word in words}


def _key(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+")


def find_resumed(family: Family, words: list[str]) -> Resumed | None:
    """What `checkpoint.resume` among these words means; None if there is nothing to go on with.

    Raises UserError if it names nothing that can be gone on with.
    """
    if not any(_key(word) == "checkpoint.resume" for word in words):
        return None
    asked = compose(family, [word for word in words if _key(word) in ASKED]).run
    if asked.job.name != "train" or asked.checkpoint.resume is None:
        return None
    if not asked.checkpoint.resume.strip():
        raise UserError("checkpoint.resume is empty; name a run folder or a checkpoint, or leave it out")
    try:
        return _find(asked)
    except UserError:
        compose(family, words)  # a mistake in the words themselves comes first
        raise


def _find(run: Run) -> Resumed | None:
    if run.checkpoint.resume == "auto":
        if run.run_id is None:
            raise UserError(
                "checkpoint.resume=auto: run_id=... says which run to continue; "
                f"checkpoint.resume={run.output_dir}/{run.family}/latest continues the newest"
            )
        folder = run_folder(run)
        return _resumed(run, folder.resolve(), newest(folder.resolve())) if folder.is_dir() else None
    found = find_checkpoint(Path(str(run.checkpoint.resume)).expanduser().resolve())
    inside = found.parent.name == CHECKPOINTS and (found.parent.parent / CONFIG).is_file()
    return _resumed(run, found.parent.parent if inside else None, found)


def _resumed(asked: Run, folder: Path | None, checkpoint: Path | None) -> Resumed:
    if folder is None:
        return Resumed(asked, None, checkpoint)
    frozen = None
    with suppress(UserError):  # without it nothing can be compared, and the checkpoint is what counts
        frozen = load_run(folder / CONFIG)
    return Resumed(asked, folder, checkpoint, _saved_words(folder / OVERRIDES), frozen)


def _saved_words(path: Path) -> list[str]:
    """The words that a run was started with; none if its folder is older than this file."""
    try:
        words = json.loads(path.read_bytes())
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("not a list of overrides")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it, and name the run's settings again") from None
    return words


def continue_in(run: Run, resumed: Resumed, named: set[str]) -> Path | None:
    """Set where a run goes on. The folder, if it is none that `output_dir` and `run_id` can say (it was moved).

    `named` are the keys that the user named. UserError if they and the resumed run leave that open.
    """
    folder = resumed.run_dir
    if folder is None:
        if run.run_id is None:
            raise UserError(
                f"checkpoint.resume={resumed.checkpoint}: not inside a run folder of {run.family}; "
                "name the new run with run_id=..."
            )
        return None
    home = folder.parent.parent
    there = Path(run.output_dir).resolve() == home
    if run.run_id is None and "output_dir" in named and not (resumed.usual and there):
        raise UserError(
            f"checkpoint.resume={folder}: not in output_dir={run.output_dir}; name the new run with run_id=..."
        )
    stays = run.run_id in (None, folder.name)
    run.run_id = run.run_id or folder.name
    if resumed.usual and "output_dir" not in named and not there:
        run.output_dir = str(home)
    return folder if stays and not resumed.usual and "output_dir" not in named else None


def take_checkpoint(run: Run, family: Family, resumed: Resumed, composition: Composition) -> None:
    """Make a composed run go on from a checkpoint: its architecture, its weights, its tokenizer, its data.

    Raises UserError, with all that is wrong at once, unless the checkpoint is whole and continues this run.
    """
    checkpoint = resumed.checkpoint
    assert checkpoint is not None
    run.checkpoint.resume = str(checkpoint)
    state = load_train_state(checkpoint)
    _check_files(checkpoint)
    problems = [*_other_origin(resumed), *_other_data(run, state.data["identity"])]
    try:
        run.model = adopt(run.model, composition.named, family, checkpoint, "checkpoint.resume")
        check_tensors(checkpoint, family.of(run.model.model_type), run.model)
    except UserError as error:
        problems.insert(0, str(error))
    if state.step > run.schedule.steps:
        problems.append(
            f"checkpoint.resume={checkpoint}: it is at step {state.step} and schedule.steps={run.schedule.steps}; "
            "a run goes on with as many steps or more"
        )
    if problems:
        raise UserError("\n".join(problems))
    before = resumed.frozen
    run.model.weights, run.data.tokenizer = (before.model.weights, before.data.tokenizer) if before else (None, None)
    if before:
        run.model.name = before.model.name


def check_looks(run: Run, resumed: Resumed, named: set[str]) -> None:
    """UserError for steps to look at that the user names now and that the checkpoint already has behind it."""
    assert resumed.checkpoint is not None
    step = load_train_state(resumed.checkpoint).step
    problems = [
        f"{key}=[{','.join(map(str, steps))}]: the run goes on after step {step}, so that none of them comes; "
        f"name steps from {step + 1} on"
        for key, steps in (("profile.steps", run.profile.steps), ("debug.steps", run.debug.steps))
        if key in named and steps and max(steps) <= step
    ]
    if problems:
        raise UserError("\n".join(problems))


def _check_files(checkpoint: Path) -> None:
    """UserError, listing every file of tensors that is no whole safetensors file, or if the tokenizer is gone."""
    problems = []
    for file in load_index(checkpoint).files:
        try:
            read_header(checkpoint / file)
        except UserError as error:
            problems.append(str(error))
    if not tokenizer_files(checkpoint / TOKENIZER):
        problems.append(f"{checkpoint / TOKENIZER}: the run's tokenizer is missing")
    if problems:
        raise UserError("damaged checkpoint: " + "\n  ".join(problems))


def _other_origin(resumed: Resumed) -> list[str]:
    """Lines for weights or a tokenizer that the user names and that are not the run's own."""
    problems = []
    given = resumed.asked.model.weights
    if given is not None and not _same_weights(given, resumed):
        problems.append(
            f"model.weights={given}: checkpoint.resume goes on with the weights of {resumed.checkpoint}; leave "
            "model.weights out, or leave checkpoint.resume out to start afresh from it"
        )
    given = resumed.asked.data.tokenizer
    if given is not None and not _same_tokenizer(given, resumed):
        problems.append(
            f"data.tokenizer={given}: checkpoint.resume goes on with the tokenizer of {resumed.checkpoint}; leave "
            "data.tokenizer out"
        )
    return problems


def _same_weights(given: str, resumed: Resumed) -> bool:
    if f"model.weights={given}" in resumed.words:
        return True  # `latest` of then, which has moved since
    own = resumed.frozen.model.weights if resumed.frozen else None
    try:
        return own is not None and find_weights(given) == Path(own)
    except UserError:
        return False


def _same_tokenizer(given: str, resumed: Resumed) -> bool:
    if f"data.tokenizer={given}" in resumed.words:
        return True
    assert resumed.checkpoint is not None
    own, theirs = _contents(resumed.checkpoint / TOKENIZER), _contents(Path(given).expanduser())
    return bool(own) and own == theirs


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tokenizer_files(folder)}


def _other_data(run: Run, before: dict[str, Any]) -> list[str]:
    from engine.data.identity import data_identity, differing, refusal

    differences = differing(before, data_identity(run))
    return [refusal(differences)] if differences else []


def finished(run: Run, resumed: Resumed, folder: Path) -> bool:
    """Whether a run has taken all its steps and said so: there is nothing left to do in its own folder."""
    assert resumed.checkpoint is not None
    if resumed.run_dir is None or folder.resolve() != resumed.run_dir:
        return False
    if load_train_state(resumed.checkpoint).step < run.schedule.steps:
        return False
    try:
        return json.loads((folder / "result.json").read_bytes()).get("status") == "done"
    except (OSError, ValueError, AttributeError):
        return False


def changed_settings(run: Run, before: Run) -> list[str]:
    """One note for each setting that bears on the numbers and is not what the resumed run had."""
    pairs = {
        f"{group}.{key}": (value, getattr(getattr(before, group), key, value))
        for group in NOTED
        for key, value in vars(getattr(run, group)).items()
    }
    return [
        f"{key} is {now}; the run that goes on had {then}"
        for key, (now, then) in pairs.items()
        if now != then and key != "schedule.steps"
    ]
