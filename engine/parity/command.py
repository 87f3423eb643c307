"""The command line of `zoo parity`. Torch-free: two folders may come from machines that this one has never seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import yaml

from engine.checkpoint.headers import read_header
from engine.errors import UserError
from engine.metrics.writer import METRICS
from engine.parity.checks import LIMITS, Check, Limits, print_checks, verdict
from engine.parity.curves import compare_curves, read_steps
from engine.parity.outputs import compare_outputs
from engine.rundir import CONFIG
from engine.verbs import read_words

OUTPUTS = "outputs.safetensors"
DIFFERENT = 1
ALIKE = {  # settings and groups of them that should be the same in two runs of a job
    "train": ("seed", "data", "optim", "schedule", "moe", "task", "precision"),
    "forward": ("precision",),
}
ELSEWHERE = (
    "path",
    "cache_dir",
    "inputs",
    "tokenizer",
    "weights",
    "micro_batch_size",
    "workers",
    "prefetch",
    "compile",
)
HELP = """Says whether two runs computed the same: A is the reference, B what is to be proven.

Usage: zoo parity A B [limits=fp32|bf16] [steps=N] [--json]

  A, B        run folders of job=forward (outputs, loss, gradients) or of job=train (losses and gradient norms)
  limits=...  how far apart they may be; bf16 if either run is in bf16, else fp32
  steps=N     compare the first N training steps alone
  --json      the comparison as JSON

Exit status: 0 within the limits, 1 beyond, 2 a mistake in this command or runs that cannot be compared."""


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    path: Path
    config: dict[str, Any]  # frozen; empty for a file that came alone

    def file(self, name: str) -> Optional[Path]:
        """The run's file of this name, if it has one."""
        if self.path.is_file():
            return self.path if self.path.name.endswith(Path(name).suffix) else None
        return self.path / name if (self.path / name).is_file() else None

    @property
    def precision(self) -> str:
        return str((self.config.get("precision") or {}).get("name", "fp32"))


def parity(words: list[str]) -> int:
    """Compare two runs; the exit status. UserError for what cannot be compared."""
    given = read_words("zoo parity", HELP, words)
    if given is None:
        return 0
    named, steps, folders = _settings(given[0])
    a, b = (side(Path(folder)) for folder in folders)
    limits = LIMITS[named or ("bf16" if "bf16" in (a.precision, b.precision) else "fp32")]
    notes = list(unlike(a.config, b.config))
    checks = compare(a, b, limits, steps)
    within = all(check.within for check in checks)
    if given[1]:
        report = {"within": within, "verdict": verdict(checks, limits), "limits": limits.name, "notes": notes}
        print(json.dumps(report | {"checks": [check.as_json() for check in checks]}, indent=1))
    else:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print_checks(checks)
        print(verdict(checks, limits), flush=True)
    return 0 if within else DIFFERENT


def compare(a: Side, b: Side, limits: Limits, steps: Optional[int] = None) -> list[Check]:
    """All that both runs have. UserError if that is nothing."""
    checks: list[Check] = []
    outputs, curves = ([x.file(name) for x in (a, b)] for name in (OUTPUTS, METRICS))
    if outputs[0] and outputs[1]:
        checks += compare_outputs(read_header(outputs[0]), read_header(outputs[1]), limits)
    if steps is not None and checks and not (curves[0] and curves[1]):
        raise UserError(f"steps={steps} has no effect: A and B are not both runs of job=train; leave it out")
    if curves[0] and curves[1]:
        checks += compare_curves(read_steps(curves[0]), read_steps(curves[1]), limits, steps)
    if not checks:
        found = "; ".join(dict.fromkeys(f"{x.path} holds {_contents(x)}" for x in (a, b)))
        raise UserError(f"{found}: nothing to compare; two runs of job=forward or two of job=train would be right")
    return checks


def _contents(one: Side) -> str:
    return " and ".join(name for name in (OUTPUTS, METRICS) if one.file(name)) or f"neither {OUTPUTS} nor {METRICS}"


def side(path: Path) -> Side:
    """A run folder with its frozen config, or a file that came alone. UserError if it is neither."""
    if not path.exists():
        raise UserError(f"{path}: no such run folder; it is OUTPUT_DIR/FAMILY/RUN_ID, for example outputs/qwen3/latest")
    config = path / CONFIG
    if not config.is_file():
        return Side(path, {})
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{config}: not readable as YAML ({str(error).splitlines()[0]})") from None
    return Side(path, values if isinstance(values, dict) else {})


def unlike(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Settings in which the runs differ and should not. UserError if they have other models."""
    if not a or not b:
        return
    for key in ("family", "model"):
        for name, one, other in _differences(key, a.get(key), b.get(key)):
            raise UserError(f"A and B are other models: {name} is {one!r} in A and {other!r} in B")
    job = (a.get("job") or {}).get("name")
    for key in ALIKE.get(job, ()):
        for name, one, other in _differences(key, a.get(key), b.get(key)):
            yield f"{name} is {one!r} in A and {other!r} in B"


# What a run from scratch learns of its tokenizer, and its checkpoints therefore say: no other model.
NAMED_LATER = ("model.bos_token_id", "model.eos_token_id")


def _differences(key: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() & b.keys()):
            if name not in ELSEWHERE and not (key == "model" and name == "name"):
                yield from _differences(f"{key}.{name}", a[name], b[name])
    elif key in NAMED_LATER and None in (a, b):
        return
    elif a != b and not isinstance(a, dict) and not isinstance(b, dict):  # an older version lacks a group
        yield key, a, b


def _settings(words: list[str]) -> tuple[Optional[str], Optional[int], list[str]]:
    """(limits, steps, both paths) of the command's words."""
    limits: Optional[str] = None
    steps: Optional[int] = None
    folders = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "limits":
            if value not in LIMITS:
                raise UserError(f"zoo parity: {word} is not known; limits={' or limits='.join(LIMITS)} are")
            limits = value
        elif key == "steps":
            if not value.isascii() or not value.isdigit() or int(value) < 1:
                raise UserError(f"zoo parity: {word} should be a whole number of at least 1")
            steps = int(value)
        else:
            folders.append(word)
    if len(folders) != 2:
        raise UserError(f"zoo parity compares two run folders, and this names {len(folders)}; zoo parity A B")
    return limits, steps, folders
