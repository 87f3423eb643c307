"""What `--help` says."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from engine.checks import CHOICES
from engine.compose import compose, family_folder, group_options
from engine.describe import descriptions
from engine.family import Family, family_names, load_dotted, load_family, proven
from engine.schema import Run
from engine.verbs import VERBS

FIXED = ("schema_version", "family")

# In this order in the help; others follow.
GROUPS = {
    "model": "the size",
    "task": "what is learnt",
    "data": "where the text comes from",
    "job": "what is done",
    "hardware": "where it runs",
    "kernels": "which implementations of its operations",
    "parallelism": "how it is divided; any other layout is spelled out, parallelism.tp=4 parallelism.pp=2",
    "precision": "what it computes in",
    "optim": "the optimizer",
    "schedule": "the learning rate over the steps",
    "checkpoint": "what is saved",
    "logger": "what is shown",
    "launcher": "how the ranks are started",
    "eval": "job=eval: the benchmark",
    "sweep": "which runs --multirun starts, and how many at a time",
}


def family_help(name: str, overrides: list[str]) -> str:
    """The help of a family, ending with the config that these overrides compose."""
    family = load_family(name)
    run = compose(family, overrides).run
    doc = (load_dotted(f"zoo.{name}:__doc__") or name).strip().splitlines()[0]
    command = f"python -m zoo.{name}"
    parts = [
        f"{doc}\n\nUsage: {command} [group=choice | key=value]...",
        "Groups and their choices (* chosen):\n" + _groups(family, run),
        "Examples:\n" + "\n".join(f"  {line}" for line in _examples(name, command)),
        "Flags:\n"
        "  --help          this text, with the config that the overrides compose\n"
        "  --cfg job       the config with everything resolved, and nothing is started\n"
        "  -m, --multirun  every combination of comma lists and range(a,b,step), each a run of its own;\n"
        "                  sweep=optuna searches, also in interval(a,b) and tag(log,interval(a,b))\n"
        "  --version       the version",
        "Keys and their values here (null leaves a value to be resolved, if it says so):\n\n" + settings(run),
    ]
    return "\n\n".join(parts).rstrip()


def settings(run: Run) -> str:
    """Every key with its value and what it means, group by group."""
    values = asdict(run)
    parts = ["\n".join(_keys("", run, {k: v for k, v in values.items() if not isinstance(v, dict)}))]
    for group in [*(g for g in GROUPS if g in values), *(k for k in values if k not in GROUPS)]:
        if isinstance(values[group], dict):
            chosen = f" ({values[group]['name']})" if "name" in values[group] else ""
            title = f"  {group}{chosen}: {GROUPS.get(group, '')}".removesuffix(": ")
            keys = {k: v for k, v in values[group].items() if k != "name"}
            parts += ["\n".join([title, *_keys(f"{group}.", getattr(run, group), keys)])] if keys else []
    return "\n\n".join(parts)


def _keys(prefix: str, group: Any, values: dict[str, Any]) -> list[str]:
    words = descriptions(type(group))
    lines = []
    for key, value in values.items():
        if key in FIXED:
            continue
        choices = CHOICES.get(prefix + key, ())
        said = re.sub(r"\bNone\b", "null", words.get(key, ""))
        if any(choice not in said for choice in choices):
            said = f"{' | '.join(choices)}{'; ' if said else ''}{said}"
        lines.append(f"    {prefix + key + '=' + _literal(value):<38} {said}".rstrip())
    return lines


def _literal(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_literal(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) and value != value.strip() else str(value)


def _groups(family: Family, run: Any) -> str:
    options = group_options(family)
    options.pop("tune", None)
    lines = []
    for group in [*(g for g in GROUPS if g in options), *(g for g in options if g not in GROUPS)]:
        chosen = getattr(getattr(run, group, None), "name", None)
        names = sizes(family) if group == "model" else options[group]
        words = " ".join(f"*{name}" if name == chosen else name for name in names)
        lines.append(f"  {group:<12} {words}\n  {'':<12} {GROUPS.get(group, '')}".rstrip())
    return "\n".join(lines)


def _examples(name: str, command: str) -> list[str]:
    latest, family = f"outputs/{name}/latest", load_family(name)
    largest = sizes(family)[-1]
    if family.data:
        return _examples_of_policy(command, latest, largest)
    experts = "expert" in (family_folder(family) / "model" / f"{largest}.yaml").read_text()
    return [
        f"{command}                                    # the defaults: a small model, real text, this machine",
        f"{command} data=text data.path=notes.txt schedule.steps=500",
        f"{command} parallelism=dp2                    # two processes",
        f"{command} -m optim.lr=1e-3,3e-3              # a sweep",
        f"{command} checkpoint.resume={latest}",
        f'{command} job=sample model.weights={latest}/hf prompt="import "',
        f"{command} job=forward model.weights={latest}/hf data.inputs=batch.safetensors grad=true",
        f"{command} model={largest} parallelism={'ep8' if experts else 'tp2_sp'} launcher=print",
    ]


def _examples_of_policy(command: str, latest: str, largest: str) -> list[str]:
    return [
        f"{command} data.path=demos                    # a small policy from a LeRobot dataset, on this machine",
        f"{command} data.path=demos parallelism=ddp2   # two processes",
        f"{command} -m data.path=demos optim.lr=1e-4,1e-3",
        f"{command} checkpoint.resume={latest}",
        f"{command} job=eval eval=libero eval.suite=libero_object model.weights={latest}/hf",
        f"{command} job=serve model.weights={latest}/hf job.port=8000",
        f"{command} job=forward model.weights={latest}/hf data.inputs=batch.safetensors grad=true",
        f"{command} model={largest} precision=bf16 parallelism=fsdp launcher=print",
    ]


def sizes(family: Family) -> list[str]:
    """The names of a family's published configs, the smallest model first."""
    known = proven().get(family.name, {}).get("parameters", {})

    def weight(file: Path) -> tuple[float, str]:
        keys = yaml.safe_load(file.read_text())
        return known.get(file.stem, float(keys.get("hidden_size", 0))), file.stem

    return [file.stem for file in sorted((family_folder(family) / "model").glob("*.yaml"), key=weight)]


def families() -> list[Family]:
    """The cards of all families, shelf by shelf."""
    return [load_family(name) for name in family_names()]


def zoo_help() -> str:
    """`zoo --help`."""
    from engine.catalogue import entry, plain

    example = next((f.name for f in families()), "FAMILY")
    lines = [
        *((verb.usage, verb.about) for verb in VERBS.values()),
        ("zoo FAMILY [key=value]...", f"run one; the same as python -m zoo.FAMILY, for example zoo {example}"),
        ("zoo FAMILY --help", f"its groups, choices and keys, for example zoo {example} --help"),
        ("zoo --version", "the version"),
    ]
    return (
        "Train and evaluate any model of the zoo with one command.\n\nUsage (python -m zoo is the same as zoo):\n"
        + "\n".join(f"  {usage:<28} {about}" for usage, about in lines)
        + "\n\n"
        + plain([entry(family) for family in families()])
    )
