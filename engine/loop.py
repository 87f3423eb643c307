"""The training loop, the same for both backends."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine.backends.base import Backend, Slice, StepResult, trained_kinds, unit_of
from engine.checkpoint.hf import export_run
from engine.checkpoint.manager import CheckpointManager
from engine.checkpoint.paths import step_folder
from engine.context import Context
from engine.data.loader import DataModule
from engine.errors import Interrupted, UserError
from engine.faults.finite import NAMED, listed
from engine.faults.retry import READS
from engine.faults.spikes import SpikeRule
from engine.inspect.looks import Looks
from engine.jobs.sample import continuation
from engine.jobs.start import Start
from engine.metrics.progress import Progress
from engine.metrics.writer import MetricsWriter
from engine.schedule import learning_rate
from engine.validation import unusable, validate

LOOK_S = 0.25  # while there are no batches: how often a rank looks whether it is to stop
GO, WAIT, STOP = range(3)  # what a rank is for before a step; the largest of them is what all do


class Loop:
    """Steps, validation, checkpoints and what the user sees of them."""

    def __init__(
        self,
        context: Context,
        backend: Backend,
        data: DataModule,
        manager: CheckpointManager,
        metrics: MetricsWriter | None,
        start: Start,
    ) -> None:
        self.context, self.run_config = context, context.run
        self.backend, self.data, self.manager, self.metrics = backend, data, manager, metrics
        self.step, self.tokens, self.best_val_loss = start.step, start.tokens, start.best_val_loss
        self.first_step, self.unit = start.step, unit_of(backend)
        self.last: dict[str, Any] = {}
        self.last_val: dict[str, Any] = {}
        self.spikes = SpikeRule(context.run.faults, start.state.get("spikes"))
        self.notes: list[str] = []  # for the user, once the step is shown
        self.looks = Looks(context, backend, start.step, self.notes.append)
        self._stop_signal: int | None = None
        resumed = manager.saved is not None and manager.saved == step_folder(context.run_dir, start.step)
        self._last_save: int | None = start.step if resumed else None
        self._begin, self._data_wait_s = 0.0, 0.0  # of the step at hand, on this rank

    def run(self) -> None:
        """Train to `schedule.steps`, save, export; raises Interrupted when a signal ended it early."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        self.context.begin()
        steps, job, settings = self.run_config.schedule.steps, self.run_config.job, self.run_config.checkpoint
        active, hardware = self.context.rank == 0, self.context.hardware
        progress = Progress(self.run_config, hardware, self.first_step, active, unit=self.unit)
        try:
            with progress:
                while self.step < steps:
                    self._wait_for_data()
                    row = self._one_step()
                    progress.step(row)
                    for note in self.notes:
                        progress.message(note)
                    self.notes.clear()
                    if self.metrics is not None:
                        self.metrics.write(row)
                    self.spikes.check(f"step {self.step} (samples {row.get('samples')})")
                    if self.step % job.eval_interval == 0 or self.step == steps:
                        self._validate(progress)
                    if self.step == steps and self.context.comm.any(self._stopping):
                        self._stop()
                    if self.step == steps or (settings.save_interval and self.step % settings.save_interval == 0):
                        self._save()
                self.manager.wait()
            self.context.page.rest()  # only rank 0 has something to do, and it may take its time
            self._finish()  # a signal that comes now finds all steps saved: the rest takes seconds and is done
        finally:
            self.looks.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def saved(self) -> Path | None:
        """The last complete checkpoint."""
        return self.manager.saved

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._stop_signal = number

    @property
    def _stopping(self) -> bool:
        return self._stop_signal is not None or self.manager.failed

    def _wait_for_data(self) -> None:
        """Return when every rank has its batches of the next step; Interrupted when one is to stop before that.

        The ranks meet here at each step, so that none begins a step that another will not take, and while any of them
        has nothing to begin with they meet again and again: a data set of bad samples may never give a row.
        """
        step, ready = self.step + 1, False
        self._begin = time.perf_counter()
        self.context.page.beat(f"step {step}, waiting for data")
        while True:
            if not ready and (ready := self.data.train.ready(0.0 if self._stopping else LOOK_S)):
                self._data_wait_s = time.perf_counter() - self._begin
                self.context.page.beat(f"step {step}, forward and backward")
            found = self.context.comm.most(STOP if self._stopping else GO if ready else WAIT)
            if found == STOP:
                self._stop()
            if found == GO:
                return

    def _stop(self) -> NoReturn:
        """Save what is not saved yet, and end. Every rank takes part."""
        if self._last_save != self.step:
            self._save(last=True)  # raises what a save in the background failed of
        self.manager.wait()
        raise Interrupted(f"stopped after step {self.step}, which is saved in {self.saved}")

    def _one_step(self) -> dict[str, Any]:
        """One optimizer step; its row of metrics."""
        step, batches = self.step + 1, self.data.train.next_step()
        lr = learning_rate(self.step, self.run_config.optim.lr, self.run_config.schedule)
        torch.manual_seed(self.run_config.seed + self.step)
        with self.looks.step(step):
            result = self.backend.train_step(batches, lr, self.spikes.accept)
        self.step += 1
        self._check(result)
        self.tokens += result.num_tokens if result.updated else 0
        self.last = {
            "step": self.step,
            "loss": result.loss_sum / max(1, result.num_tokens),
            "grad_norm": result.grad_norm,
            "lr": lr,
            **self._items(result.num_tokens),
            "data_wait_s": self._data_wait_s,
            "step_s": time.perf_counter() - self._begin,
            **result.metrics,
            **self.data.rows(self.step),
            **self._troubles(),
        }
        if self.spikes.last is not None:
            self._note_spike()
        return self.last

    def _items(self, of_step: int) -> dict[str, int]:
        """How much was learned from so far, and in this step: tokens, or samples."""
        return {"tokens" if self.unit == "tokens" else f"{self.unit}_seen": self.tokens, f"step_{self.unit}": of_step}

    def _troubles(self) -> dict[str, Any]:
        """How many samples were skipped and reads tried again so far, where there were any."""
        counts = {"bad_samples": len(self.data.bad.seen), "read_retries": READS.count}
        return {name: number for name, number in counts.items() if number}

    def _note_spike(self) -> None:
        """A loss far above the recent ones goes into the metrics with its samples, and maybe ends the run."""
        spike, rows = self.spikes.last, self.run_config.data.global_batch_size
        first, last = (self.step - 1) * rows, self.step * rows - 1
        self.last |= {"spike_limit": spike.limit, "skipped": spike.skipped, "samples": [first, last]}
        what = "skipped" if spike.skipped else "learned all the same (faults.on_spike=warn)"
        where = f"step {self.step}, samples {first} to {last}"
        self.notes.append(f"{where}: loss {spike.loss:.4g} is a spike, above {spike.limit:.4g}; {what}")

    def _check(self, result: StepResult) -> None:
        """A loss or gradient that is not finite ends the run; nothing has been updated."""
        if math.isfinite(result.loss_sum) and math.isfinite(result.grad_norm):
            return
        what = "loss" if not math.isfinite(result.loss_sum) else "gradient norm"
        value = result.loss_sum if what == "loss" else result.grad_norm
        where = f"step {self.step}" + (f", rank {result.bad_rank}" if result.bad_rank is not None else "")
        rows = self.run_config.data.global_batch_size
        whole_batch = f"{(self.step - 1) * rows} to {self.step * rows - 1}, the whole batch"
        samples = ", ".join(map(str, result.bad_samples)) or whole_batch
        clip = "a smaller optim.clip_grad" if self.run_config.optim.clip_grad else "optim.clip_grad=1"
        tensors = f"; it is so for {listed(result.bad_tensors)}" if result.bad_tensors else ""
        raise UserError(
            f"the {what} is {value} at {where} (samples {samples}){tensors}; no weight was updated and {self._kept()}; "
            f"a lower optim.lr, {clip} or other data would be the first things to try"
        )

    def _validate(self, progress: Progress) -> None:
        """Loss over the held-out rows, in nats per token and bits per byte; of policies also their actions' errors."""
        self.context.page.beat(f"step {self.step}, validation")
        sets, comm = self.data.validation, self.context.comm
        fields = validate(self.backend, sets, self.run_config.job.eval_rows, comm)
        if not fields:
            return
        row = {"step": self.step, **fields}
        self.last_val = row
        progress.validation(row)
        if self.metrics is not None:
            self.metrics.write(row)
        if bad := unusable(fields):
            raise UserError(
                f"the validation loss is not finite after step {self.step} ({bad}, held-out rows); {self._kept()} and "
                "the weights of this step are not saved; a lower optim.lr would be the first thing to try"
            )

    def _kept(self) -> str:
        with suppress(UserError):  # what ends the run is worse
            self.manager.wait()
        return f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"

    def _save(self, last: bool = False) -> None:
        """A checkpoint of this step; every rank takes part. No more data is wanted after the `last` one."""
        # A validation of earlier weights says nothing of these.
        self.context.page.beat(f"step {self.step}, saving a checkpoint")
        val_loss = self.last_val.get("val_loss") if self.last_val.get("step") == self.step else None
        if val_loss is not None:
            self.best_val_loss = min(val_loss, self.best_val_loss or math.inf)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "optimizer_step": self.backend.optimizer_step(),
            "best_val_loss": self.best_val_loss,
            "val_loss": val_loss,
            "data": self.data.train.state(self.step),
            "spikes": self.spikes.state(),
        }
        if last:
            self.data.train.stop()  # it would take the processor from the save
        self._last_save = self.step
        self.manager.save(self.step, self._marked(self.backend.state(trained_kinds(self.backend))), state)

    def _marked(self, slices: Iterator[Slice]) -> Iterator[Slice]:
        """The slices; each that is taken counts as progress."""
        for part in slices:
            self.context.page.beat(f"step {self.step}, saving a checkpoint")
            yield part

    def _finish(self) -> None:
        """Export the model, let it speak."""
        if not self.run_config.checkpoint.export_hf or self.saved is None:
            return
        if self.context.rank == 0:
            out = export_run(self.context, self.saved)
            self.context.result["hf"] = str(out)
            if self.context.family.native is None:
                sample = continuation(self.context, out)
                self.context.result["sample"] = sample
                self.context.log(f"a sample: {sample['prompt']}{sample['text']}\n")
            self.context.log(f"Hugging Face directory: {out}")
        self.context.comm.barrier()

    def summary(self) -> dict[str, Any]:
        """What result.json says of the run."""
        return {
            "step": self.step,
            "loss": self.last.get("loss"),
            **{k: v for k, v in self.last_val.items() if k != "step"},
            "tokens": self.tokens,
            **({"spikes": self.spikes.spikes, "skipped_steps": self.spikes.skipped} if self.spikes.spikes else {}),
            **self._troubles(),
            **({"skipped_samples": dict(islice(self.data.bad.seen.items(), NAMED))} if self.data.bad.seen else {}),
            "checkpoint": str(self.saved) if self.saved else None,
            "memory_peak_bytes": self.context.hardware.memory().peak,
        }
