"""The data of a policy's training run: demonstrations, the family's processor for them, and what the policy keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Protocol

from torch import Tensor

from engine.data.lerobot.corpus import Demonstrations
from engine.data.lerobot.loader import PolicyData, PolicyTrain, build_policy_data
from engine.data.lerobot.meta import Meta
from engine.data.lerobot.request import Request, request_of
from engine.data.policy_batch import PolicyBatch
from engine.data.resources import Log
from engine.data.sources import BadSamples
from engine.errors import UserError
from engine.policy import conventions, statistics
from engine.policy.conventions import Conventions
from engine.policy.describe import conventions_of
from engine.policy.judge import Judged
from engine.policy.statistics import Statistics
from engine.schema import Run


class Processor(Protocol):
    """A family's: pure, and the same in training and in serving."""

    tokenizer: Optional[Path]  # the folder of the tokenizer that it reads prompts with

    def __call__(self, batch: PolicyBatch) -> PolicyBatch:
        """What the model reads, with noise and times drawn for each sample by its number."""

    def actions(self, normalised: Tensor) -> Tensor:
        """What the model gave, as actions [B, T, A] in the dataset's units."""


@dataclass(frozen=True)
class Parts:
    """What a family's processor may be made of."""

    run: Run
    request: Request
    statistics: dict[str, Statistics]
    tasks: Sequence[str]  # the instructions of all datasets
    log: Log
    sources: Sequence[Conventions]  # what each source of the data says of itself
    tokenizer: Optional[Path] = None  # of a checkpoint that is resumed

    @property
    def conventions(self) -> Conventions:
        """What the policy will read and give."""
        return self.sources[0]


MakeProcessor = Callable[[Parts, str], Processor]  # the second: which of two streams of noise, "train" or "validation"


@dataclass
class Tokenizing:
    """What a checkpoint copies of a tokenizer. Policies have no end of text."""

    folder: Optional[Path]
    eos_id: Optional[int] = None


class PolicyModule:
    """What `engine.data.loader.DataModule` is to a language model."""

    previews = ()

    def __init__(self, data: PolicyData, validation: dict[str, Judged], tokenizer: Tokenizing, texts: dict[str, str]):
        """`texts`: what a policy directory holds besides weights, by file."""
        self._data, self.validation, self.tokenizer, self.texts = data, validation, tokenizer, texts

    @property
    def train(self) -> PolicyTrain:
        """The training samples."""
        return self._data.train

    @property
    def bad(self) -> BadSamples:
        """What was skipped so far."""
        return self._data.bad

    def rows(self, step: int) -> dict[str, int]:
        """`rows.<source>`: samples of each source of a mixture in the first `step` steps, over all ranks."""
        return self._data.rows(step)

    def close(self) -> None:
        """Stop the threads and close the videos."""
        self._data.close()


def build(
    run: Run,
    dp_rank: int,
    dp_size: int,
    make: MakeProcessor,
    state: Optional[dict[str, Any]] = None,
    log: Log = print,
    tokenizer_dir: Optional[Path] = None,
    pin_memory: bool = False,
) -> PolicyModule:
    """The demonstrations of a run, as `engine.data.loader.build_data` builds text. Raises UserError."""
    request = request_of(run.data.cameras, run.data.horizon, run.model.horizon)
    made: dict[str, Processor] = {}
    parts: list[Parts] = []

    def processors(opened: Sequence[Demonstrations], measured: dict[str, Statistics]) -> Processor:
        measured = chosen(run, measured, tokenizer_dir)
        tasks = sorted({task for meta in _metas(opened) for task in meta.tasks.values()})
        described = [conventions_of(run.family, _metas([one]), request, run.data.conventions) for one in opened]
        parts.append(Parts(run, request, measured, tasks, log, described, tokenizer_dir))
        made.update({stream: make(parts[0], stream) for stream in ("train", "validation")})
        return made["train"]

    data = build_policy_data(run, dp_rank, dp_size, request, state, log, pin_memory, processors)
    own, used = parts[0].conventions, parts[0].statistics
    judge = made["validation"]
    names = own.action.names
    validation = {name: Judged(held_out, judge, names) for name, held_out in data.validation.items()}
    texts = {
        conventions.FILE: json.dumps(dataclasses.asdict(own), indent=2) + "\n",
        statistics.FILE: statistics.text(used),
    }
    return PolicyModule(data, validation, Tokenizing(judge.tokenizer), texts)


def chosen(run: Run, measured: dict[str, Statistics], tokenizer_dir: Optional[Path]) -> dict[str, Statistics]:
    """What to normalise with: of a resumed run its own, of a policy that is trained on what `data.statistics` says.

    Raises UserError where that says nothing and a policy and the datasets disagree.
    """
    if tokenizer_dir is not None:
        return statistics.load(tokenizer_dir.parent)
    folder = Path(run.model.weights) if run.model.weights else None
    if folder is None or not (folder / statistics.FILE).is_file() or run.data.statistics == "dataset":
        if run.data.statistics == "policy":
            raise UserError(f"data.statistics=policy: model.weights={folder} brings none; leave it out")
        return measured
    own = statistics.load(folder)
    if run.data.statistics is None:
        statistics.check(own, measured, f"model.weights={folder}")
    return own


def _metas(opened: Sequence[Demonstrations]) -> list[Meta]:
    return [dataset.meta for one in opened for dataset in one.datasets]
