"""The demonstrations of a run for one data-parallel rank: training samples in a global order, and held-out ones.

Sample n of training comes from a source by the mixture's turns; the k-th of a source is place k % len of epoch
k // len in a seeded order of its frames. So one integer is all that resuming needs, with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from engine.data.ahead import Ahead
from engine.data.identity import corpus_identity, differing, mixture_identity, refusal, settings_identity
from engine.data.lerobot.corpus import Demonstrations, open_demonstrations, union
from engine.data.lerobot.request import Request, missing, unlike
from engine.data.lerobot.samples import Reader
from engine.data.mixture import Source, about, sources
from engine.data.order import Order
from engine.data.policy_batch import PolicyBatch
from engine.data.resources import Log, cache_dir
from engine.data.schedule import Turns
from engine.data.sources import BadSamples, list_files, refuse
from engine.errors import UserError
from engine.policy.statistics import Statistics
from engine.schema import Data, Run
from engine.words import counted

STATE_VERSION = 1
SEED = 0  # of the held-out samples' order: runs with other seeds are judged by the same ones
Process = Callable[[PolicyBatch], Any]  # what a family makes of a batch before it goes to the device
# Makes it, from the opened data and their statistics.
MakeProcess = Callable[[Sequence[Demonstrations], dict[str, Statistics]], Process]


class Frames:
    """The endless samples of one source, by their number among them."""

    def __init__(self, order: Order):
        self._order, self._epochs = order, {}

    def __call__(self, number: int) -> int:
        """The frame of a sample. Called by one thread, forwards."""
        epoch, place = divmod(number, len(self._order))
        if epoch not in self._epochs:
            self._epochs = {epoch: self._order.epoch(epoch)}
        return int(self._epochs[epoch][place])


class PolicyTrain:
    """Step s uses samples [s * B, (s + 1) * B) of the global order, each rank a share; B = `data.global_batch_size`."""

    def __init__(
        self,
        found: Sequence[tuple[Source, Demonstrations]],
        orders: Sequence[Order],
        reader: Reader,
        data: Data,
        identity: dict[str, Any],
        dp: tuple[int, int],
        state: Optional[dict[str, Any]],
        pin_memory: bool,
        process: Optional[Process],
    ):
        rank, ranks = dp
        assert data.global_batch_size % (ranks * data.micro_batch_size) == 0, "engine.resolve refuses this"
        self.names = tuple(source.name for source, _ in found)
        self._turns = Turns([source.weight for source, _ in found])
        self._frames = [Frames(order) for order in orders]
        self._reader, self._data, self._identity = reader, data, identity
        self._rank, self._share, self._pin, self._process = rank, data.global_batch_size // ranks, pin_memory, process
        step = 0 if state is None else self._checked(state) // data.global_batch_size
        self._ahead = Ahead(self._batches, step, data.prefetch, "demonstrations")

    def ready(self, seconds: float) -> bool:
        """Whether `next_step` would answer at once, now or within that time."""
        return self._ahead.ready(seconds)

    def next_step(self) -> list[Any]:
        """This rank's micro-batches of the next step. What goes wrong in the threads is raised here."""
        return self._ahead.next()

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to go on with `step`: the same on every rank, whatever their number. Plain JSON."""
        return {"version": STATE_VERSION, "row": step * self._data.global_batch_size, "identity": self._identity}

    def rows_by_source(self, step: int) -> dict[str, int]:
        """Samples of each source in the first `step` steps, over all ranks."""
        before = self._turns.before(step * self._data.global_batch_size).tolist()
        return dict(zip(self.names, before, strict=True))

    def stop(self) -> None:
        """No more steps will be asked for."""
        self._reader.closed.set()

    def close(self) -> None:
        """Stop the thread."""
        self.stop()
        self._ahead.close()

    def _batches(self, step: int) -> list[Any]:
        first = step * self._data.global_batch_size + self._rank * self._share
        numbers = range(first, first + self._share)
        places = [self._turns.place(number) for number in numbers]
        wanted = [(source, self._frames[source](number)) for source, number in places]
        batches = self._reader.batches(wanted, list(numbers), self._data.micro_batch_size)
        batches = batches if self._process is None else [self._process(batch) for batch in batches]
        return [batch.pin_memory() for batch in batches] if self._pin else batches

    def _checked(self, state: dict[str, Any]) -> int:
        """Raises UserError if the state belongs to other data or settings: the samples would not be the same."""
        if state["version"] != STATE_VERSION:
            raise UserError(
                f"checkpoint.resume: data state of version {state['version']}, and this Zooforge reads {STATE_VERSION}"
            )
        if differences := differing(state["identity"], self._identity):
            raise UserError(refusal(differences))
        return state["row"]


class PolicyHeldOut:
    """The samples of held-out episodes: the same ones at every evaluation, whatever the seed and number of ranks."""

    def __init__(self, source: int, frames: np.ndarray, reader: Reader, size: int, dp: tuple[int, int]):
        self._source, self._frames, self._reader, self._size, self._dp = source, frames, reader, size, dp

    def coverage(self, rows: int) -> tuple[int, int, bool]:
        """(samples that are used, samples that they were picked from, whether those are all held-out ones)."""
        return min(rows, len(self._frames)), len(self._frames), True

    def batches(self, rows: int) -> list[PolicyBatch]:
        """This rank's share of `rows` samples spread evenly over the held-out frames, or of all if there are fewer.

        Every rank gets the same number of full micro-batches; samples with the id -1 fill them up.
        """
        rank, ranks = self._dp
        number = min(rows, len(self._frames))
        picked = self._frames[np.arange(number) * len(self._frames) // max(1, number)]
        share = -(-number // (ranks * self._size)) * self._size
        ids = np.arange(rank * share, (rank + 1) * share)
        frames = picked[np.minimum(ids, number - 1)].tolist()
        named = np.where(ids < number, ids, -1).tolist()
        return self._reader.batches([(self._source, frame) for frame in frames], named, self._size)


@dataclass
class PolicyData:
    """What a run on demonstrations reads."""

    train: PolicyTrain
    demonstrations: Sequence[Demonstrations]
    statistics: dict[str, Statistics]  # by feature, of the union of all sources
    validation: dict[str, PolicyHeldOut] = field(default_factory=dict)
    bad: BadSamples = field(default_factory=lambda: BadSamples(0))

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the training sources, by the numbers in `PolicyBatch.sources`."""
        return self.train.names

    @property
    def held_out(self) -> Optional[PolicyHeldOut]:
        """The first validation set; None if there is none."""
        return next(iter(self.validation.values()), None)

    def rows(self, step: int) -> dict[str, int]:
        """`rows.<source>`: samples of each source of a mixture in the first `step` steps, over all ranks."""
        return {f"rows.{name}": rows for name, rows in self.train.rows_by_source(step).items() if name}

    def close(self) -> None:
        """Stop the threads and close the videos."""
        self.train.close()
        for one in self.demonstrations:
            one.close()


def build_policy_data(
    run: Run,
    dp_rank: int,
    dp_size: int,
    request: Request,
    state: Optional[dict[str, Any]] = None,
    log: Log = print,
    pin_memory: bool = False,
    make_process: Optional[MakeProcess] = None,
) -> PolicyData:
    """The demonstrations of a run for one data-parallel rank; `state` from `PolicyTrain.state` goes on where it was.

    What `make_process` (a family's) gives is applied to every training batch in the reading thread. Raises UserError
    for data that cannot be used.
    """
    data, bad = run.data, BadSamples(run.data.max_bad_samples, log)
    named = sources(data)
    files = [list_files(source.data) for source in named]
    opened = [_open(run, source, [f.path for f in found], bad) for source, found in zip(named, files, strict=True)]
    metas = [dataset.meta for one in opened for dataset in one.datasets]
    refuse([line for meta in metas for line in missing(meta, request)])
    refuse(list(unlike(metas, request)))
    identities = [corpus_identity(source.data.name, found) for source, found in zip(named, files, strict=True)]
    whole = (
        identities[0]
        if not named[0].name
        else mixture_identity([(source.name, identity) for source, identity in zip(named, identities, strict=True)])
    )
    reader = Reader(opened, request, bad)
    found = list(zip(named, opened, strict=True))
    orders = [_order(run, source, one, log) for source, one in found]
    identity = settings_identity(run) | {"corpus": whole}
    dp = (dp_rank, dp_size)
    validation = {
        source.name: PolicyHeldOut(number, one.side(held_out=True), reader, data.micro_batch_size, dp)
        for number, (source, one) in enumerate(found)
        if len(one.side(held_out=True))
    }
    measured = union(opened, (request.state, request.action))
    process = make_process(opened, measured) if make_process else None
    train = PolicyTrain(found, orders, reader, data, identity, dp, state, pin_memory, process)
    return PolicyData(train, opened, measured, validation, bad)


def _open(run: Run, source: Source, folders: list[Path], bad: BadSamples) -> Demonstrations:
    with about(source):
        return open_demonstrations(folders, cache_dir(run), source.data.held_out, bad, run.data.workers)


def _order(run: Run, source: Source, one: Demonstrations, log: Log) -> Order:
    frames = one.side(held_out=False)
    called = f"{source.name}: " if source.name else ""
    if not len(frames):
        raise UserError(f"{source.key}.path={source.data.path}: no episode is left for training; lower data.held_out")
    log(
        f"data: {called}{counted(one.episodes_of[False], 'episode')} for training ({counted(len(frames), 'frame')}), "
        f"{one.episodes_of[True]} held out"
    )
    return Order(frames, run.seed, run.data.shuffle_documents, one.episodes)
