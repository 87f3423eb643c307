"""What a run folder tells about the run. Free of torch; a file that is missing or damaged is no error."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from engine.checkpoint.index import STATE
from engine.checkpoint.paths import CHECKPOINTS, complete
from engine.family import load_dotted, load_family
from engine.metrics.text import count, duration, memory, percent
from engine.metrics.writer import METRICS, read_rows

LOOKS = {"Profile: traces and dearest operations": "profile", "Statistics of the layers' outputs": "layers.jsonl"}


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint."""

    step: int
    path: Path
    val_loss: float | None
    size: int
    best: bool
    newest: bool


@dataclass(frozen=True)
class Facts:
    """All that the report shows."""

    folder: Path  # as a user would type it
    config: dict[str, Any]
    config_text: str
    result: dict[str, Any]
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    checkpoints: list[Saved]
    hf: Path | None
    command: list[str]
    looks: list[tuple[str, Path]]  # what was asked to be looked at, and where it lies

    def value(self, dotted: str, default: Any = None) -> Any:
        """A setting of the frozen config, `optim.lr`."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def family(self) -> str:
        return str(self.value("family", "model"))

    @property
    def status(self) -> str:
        """done, interrupted, failed, or unknown for a run that was killed."""
        return str(self.result.get("status", "unknown"))

    @property
    def step(self) -> int:
        return self.train[-1]["step"] if self.train else 0

    def column(self, field: str) -> list[tuple[float, float | None]]:
        """(step, value) of a field over the training rows; None where it is missing or not finite."""
        return [(row["step"], finite(row.get(field))) for row in self.train]


def finite(value: Any) -> float | None:
    """A number as it is, anything else as None."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number and math.isfinite(value) else None


def gather(run_dir: Path, result: dict[str, Any] | None = None) -> Facts:
    """The facts of a run folder. `result` stands for a result.json that is still to be written."""
    rows = list(read_rows(run_dir / METRICS))
    folder = as_typed(run_dir)
    config_text = _text(run_dir / "config.yaml")
    hf = run_dir / "hf"
    return Facts(
        folder=folder,
        config=_yaml(config_text),
        config_text=config_text,
        result=_json(run_dir / "result.json") if result is None else result,
        train=[row for row in rows if "loss" in row],
        validation=[row for row in rows if "val_loss" in row],
        checkpoints=_checkpoints(run_dir, folder),
        hf=folder / "hf" if (hf / "config.json").is_file() else None,
        looks=[(what, folder / name) for what, name in LOOKS.items() if (run_dir / name).exists()],
        command=shlex.split(next(iter(_text(run_dir / "command.txt").splitlines()), "")),
    )


def as_typed(path: Path) -> Path:
    """Relative to the current folder if it lies in it."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else absolute


def figures(facts: Facts) -> list[tuple[str, str, str]]:
    """(name, value, detail) of the key figures; those that the run has no value for are left out."""
    return [f for f in (*_learning(facts), *_machine(facts)) if f[1]]


def _learning(facts: Facts) -> list[tuple[str, str, str]]:
    steps = facts.value("schedule.steps")
    best = min((v for row in facts.validation if (v := finite(row["val_loss"])) is not None), default=None)
    last_val = facts.validation[-1] if facts.validation else {}
    bits = finite(last_val.get("val_bits_per_byte"))
    last = facts.train[-1] if facts.train else {}
    samples = "samples_seen" in last
    seen = last.get("samples_seen", last.get("tokens", 0))
    val, loss = finite(last_val.get("val_loss")), facts.column("loss")[-1][1] if facts.train else None
    return [
        ("Validation loss", number(val), f"best {number(best)}, {_rows(last_val)}" if best is not None else ""),
        ("Bits per byte", number(bits), "validation"),
        ("Training loss", number(loss), "last step" + ("" if samples else ", nats per token")),
        ("Steps", f"{facts.step:,}", f"of {steps:,}" if isinstance(steps, int) else ""),
        ("Samples" if samples else "Tokens", count(seen) if facts.train else "", "trained on"),
        ("Action error", number(finite(last_val.get("action_error"))), "held-out, mean absolute, the dataset's units"),
        ("Parameters", count(n) if (n := parameters(facts)) else "", str(facts.value("model.name", ""))),
    ]


def _rows(row: dict[str, Any]) -> str:
    """Of how much held-out text a validation row speaks: `384 of 1,022 held-out rows`."""
    rows, of = row.get("val_rows"), row.get("val_rows_of")
    if not isinstance(rows, int) or not isinstance(of, int):
        return "nats per token"
    return f"{rows:,} of {'' if row.get('val_rows_whole') else 'the first '}{of:,} held-out rows"


def _machine(facts: Facts) -> list[tuple[str, str, str]]:
    rates = {
        name: [v for _, v in facts.column(name) if v is not None]
        for name in ("tokens_per_s", "samples_per_s", "tflops", "mfu", "mem_bytes", "step_s", "data_wait_s")
    }
    busy, waited = sum(rates["step_s"]), sum(rates["data_wait_s"])
    unit = "samples" if rates["samples_per_s"] else "tokens"
    speed, tflops, mfu = rates[f"{unit}_per_s"], rates["tflops"], rates["mfu"]
    arithmetic = [f"{median(tflops):.3g} TFLOP/s"] if tflops else []
    arithmetic += [f"MFU {percent(median(mfu))}"] if mfu else []
    return [
        (f"{unit.capitalize()} per second", count(median(speed)) if speed else "", ", ".join(arithmetic)),
        ("Memory", memory(max(rates["mem_bytes"])) if rates["mem_bytes"] else "", "peak of rank 0"),
        (
            "Time",
            duration(busy) if busy else "",
            f"in steps; {percent(waited / busy)} waiting for data" if busy else "",
        ),
    ]


def parameters(facts: Facts) -> int | None:
    """Of the whole model, from its published shapes; None if the family cannot be loaded."""
    try:
        family = load_family(facts.family).of(facts.value("model.model_type"))
        model = load_dotted(family.config)(**facts.config["model"])
        return sum(math.prod(shape) for shape in load_dotted(family.weights)(model).parameters.values())
    except Exception:  # a report of an old or damaged folder is better than none
        return None


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def continue_command(facts: Facts) -> str:
    """The command that goes on from the newest checkpoint, "" if there is none.

    It takes the run's settings up by itself. A finished run gets as many steps again.
    """
    if not facts.checkpoints:
        return ""
    words = [*_program(facts), f"checkpoint.resume={facts.folder}"]
    steps = facts.value("schedule.steps")
    if isinstance(steps, int) and facts.checkpoints[-1].step >= steps:
        words.append(f"schedule.steps={2 * steps}")
    return shlex.join(words)


def sample_command(facts: Facts) -> str:
    """The command that lets the exported model speak, "" if it was not exported."""
    if facts.hf is None:
        return ""
    prompt = str(facts.value("job.sample_prompt", "import "))
    return f"{shlex.join([*_program(facts), 'job=sample', f'model.weights={facts.hf}'])} {_quoted('prompt', prompt)}"


def _program(facts: Facts) -> list[str]:
    return facts.command[:3] if facts.command[1:2] == ["-m"] else ["python", "-m", f"zoo.{facts.family}"]


def _quoted(key: str, text: str) -> str:
    """key=text for a shell, in the plainest quotes that serve."""
    return shlex.quote(f"{key}={text}") if re.search(r'["$`\\!]', text) else f'{key}="{text}"'


def _checkpoints(run_dir: Path, folder: Path) -> list[Saved]:
    found = complete(run_dir / CHECKPOINTS)
    losses = {step: finite(_json(path / STATE).get("val_loss")) for step, path in found.items()}
    best = min((s for s in losses if losses[s] is not None), key=lambda s: (losses[s], s), default=None)
    return [
        Saved(
            step=step,
            path=folder / CHECKPOINTS / path.name,
            val_loss=losses[step],
            size=sum(p.stat().st_size for p in path.rglob("*") if p.is_file()),
            best=step == best,
            newest=step == max(found),
        )
        for step, path in found.items()
    ]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
