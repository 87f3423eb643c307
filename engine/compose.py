"""From the words on a command line to a typed `Run`, with Hydra's compose API.

Hydra merges the groups; single values are set here, so that every mistake gets its own line and all are reported at
once. Nothing of Hydra's is written to disk and no third-party Hydra plugin is loaded.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import conf
from engine.checks import value_problems
from engine.errors import UserError
from engine.family import Family
from engine.freeze import literal, to_run, typed_run
from engine.schema import JOBS, Run
from engine.suggest import Keys, did_you_mean, expected_type, whole_number
from hardware import registry

# A plugin that happens to be installed must not change a run: the namespace is closed before Hydra looks into it.
sys.modules.setdefault("hydra_plugins", None)  # type: ignore[arg-type]

import hydra  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: E402
from hydra.core.override_parser.types import Override, Quote, QuotedString  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig, OmegaConf, StringNode  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

HARDWARE = "hardware"
TUNE = "tune"  # a family's settings for one hardware, chosen with it

OmegaConf.register_new_resolver("tenth", lambda steps: max(0, steps // 10), replace=True)


@dataclass
class Composition:
    """A composed run and what the user named: keys and groups with the text that was given."""

    run: Run
    named: dict[str, str] = field(default_factory=dict)


def compose(family: Family, overrides: list[str]) -> Composition:
    """The run that a recipe and these overrides describe, before anything is resolved.

    Raises UserError with one line for each unknown key, option and value of a wrong type, and for each value that is
    wrong by itself, so that one answer names them all.
    """
    groups = group_options(family)
    choices, values, removed, problems = _sort(overrides, groups)
    family = family.of(_model_type(family, choices, values))
    hardware = choices.get(HARDWARE)
    if hardware in groups.get(TUNE, ()):
        choices.setdefault(TUNE, choices[HARDWARE])
    shared = choices if hardware in groups[HARDWARE] else choices | ({HARDWARE: "auto"} if hardware else {})
    config = copy.deepcopy(_compose_groups(family, tuple(shared.items())))
    if shared is not choices and hardware:
        config.hardware.name = hardware  # a plugin of another package, which has no file in conf/
    keys = Keys(config, tuple(groups))
    problems += [_removal(word, keys, groups) for word in removed]
    for key, text in values.items():
        try:
            _set(config, keys, key, text, groups)
        except UserError as error:
            problems.append(str(error))
    try:
        run = to_run(config)
    except OmegaConfBaseException as error:
        problems.append(f"{getattr(error, 'full_key', None) or 'config'}: {_first_line(error)}")
    else:
        problems += value_problems(run, family) if problems else []  # otherwise the plan looks at all of it
    if problems:
        raise UserError("\n".join(problems))
    return Composition(run, {**choices, **values})


def _model_type(family: Family, choices: dict[str, str], values: dict[str, str]) -> str | None:
    """The architecture that is asked for: the named size's, else that of the weights' own config.json."""
    if not family.variants:
        return None
    if size := choices.get("model"):
        named = OmegaConf.load(family_folder(family) / "model" / f"{size}.yaml")
        return str(named.get("model_type"))  # type: ignore[union-attr]
    for key in ("model.weights", "job.source"):
        folder = Path(values.get(key) or "/nowhere").expanduser()
        files = [folder / "config.json", folder / "hf" / "config.json", *folder.glob("checkpoints/step_*/config.json")]
        for file in files:
            with suppress(OSError, ValueError, AttributeError):
                return str(json.loads(file.read_bytes()).get("model_type"))
    return None


def family_folder(family: Family) -> Path:
    """Where a family's recipe lies."""
    return Path(import_module(f"zoo.{family.name}").__file__ or "").parent


def shared_folder() -> Path:
    """Where the groups that all families share lie."""
    return Path(conf.__file__ or "").parent


def group_options(family: Family) -> dict[str, list[str]]:
    """Every config group and its options, the family's own groups first."""
    options: dict[str, set[str]] = {}
    for root in (family_folder(family), shared_folder()):
        for file in sorted(root.glob("*/*.yaml")):
            options.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(found) for name, found in options.items()}


def parse(text: str) -> Override:
    """One override in Hydra's grammar; UserError where it has none."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise UserError(f"cannot read '{text}'; write key=value, and quote what is not plain: \"key='a, b'\"") from None


def _sort(
    overrides: list[str], groups: dict[str, list[str]]
) -> tuple[dict[str, str], dict[str, str], list[str], list[str]]:
    """Group choices, values by key (the last one wins), removals, and what cannot be right."""
    choices: dict[str, str] = {}
    values: dict[str, str] = {}
    removed: list[str] = []
    problems: list[str] = []
    for word in overrides:
        key, equals, text = word.partition("=")
        key = key.strip()
        if key.startswith("~"):
            removed.append(key)
        elif not equals or not key:
            problems.append(f"'{word}' is not an override; write key=value, for example model=tiny")
        elif (key := key.lstrip("+")) not in groups:
            values[key] = text
        elif (choice := text.strip("'\"")) in groups[key] or (key == HARDWARE and choice in registry.outside()):
            choices[key] = choice
        else:
            choices.pop(key, None)
            problems.append(f"{key}={text}: {_choice_problem(text, groups[key])}")
    return choices, values, removed, problems


def _removal(word: str, keys: Keys, groups: dict[str, list[str]]) -> str:
    """What to write instead of Hydra's `~key`."""
    key = word[1:]
    node = keys.node(key)
    why = f"'{word}': a run's keys are fixed and none can be removed"
    if key in groups:
        return f"{why}; choose with {key}={' or '.join(groups[key][:3])}"
    if node is None:
        return f"{why}; {key} is none{keys.near(key)}"
    if node._is_optional():
        return f"{why}; set {key}=null instead"
    return f"{why}; leave it out, and {key} is {node._value()}"


def _choice_problem(text: str, options: list[str]) -> str:
    if "," in text:
        return f"one choice is needed; --multirun runs several. The choices are {', '.join(options)}"
    return f"there is no such choice{did_you_mean(text, options)}; the choices are {', '.join(options)}"


@lru_cache(maxsize=64)
def _compose_groups(family: Family, choices: tuple[tuple[str, str], ...]) -> DictConfig:
    """The recipe with these choices, typed. Kept, since the runs of a sweep mostly differ in single values."""
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=typed_run(family))
    for name, job in JOBS.items():
        store.store(group="schema/job", name=name, node=job)
    shared = QuotedString(f"file://{shared_folder()}", Quote.single).with_quotes()
    words = [f"hydra.searchpath=[{shared}]", *(f"{key}={_quoted(option)}" for key, option in choices)]
    try:
        with hydra.initialize_config_dir(str(family_folder(family)), version_base="1.3"):
            return hydra.compose("recipe", words)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"the recipe of {family.name} does not compose: {_first_line(error)}") from None


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _set(config: DictConfig, keys: Keys, key: str, text: str, groups: dict[str, list[str]]) -> None:
    """Set one value in place, or say what is wrong with it."""
    group, _, leaf = key.partition(".")
    if leaf == "name" and group in groups:
        raise UserError(f"{key}={text}: a group's name follows from its choice; write {group}={text}")
    if key in ("family", "schema_version", "model.model_type"):
        raise UserError(f"{key}={text}: it is fixed by the recipe and the size, and cannot be set")
    node = keys.node(key)
    if node is None:
        raise UserError(_job_problem(key, str(config.job.name)) or f"{key}: there is no such key{keys.near(key)}")
    value = _plain_text(text) if isinstance(node, StringNode) else _value(key, text)
    try:
        OmegaConf.update(config, key, value, merge=False, force_add=keys.is_open(key))
    except (OmegaConfBaseException, ValueError):
        raise UserError(f"{key}={text}: must be {expected_type(node)}{whole_number(node, text)}") from None


def _job_problem(key: str, job: str) -> str | None:
    """A line for a key of another job."""
    group, _, leaf = key.partition(".")
    owners = [name for name, cls in JOBS.items() if leaf in {f.name for f in fields(cls)}]
    if group != "job" or not owners:
        return None
    return f"{key}: it belongs to job={' and job='.join(owners)}, and this is job={job}; leave it out"


def _value(key: str, text: str) -> Any:
    override = parse(f"{key}={text}")
    if override.is_sweep_override():
        raise UserError(f"{key}={text}: one value is needed; --multirun runs several")
    return override.value()


def _plain_text(text: str) -> str | None:
    """The value of a key that holds text: as it was typed, except that `null` and Hydra's quotes mean what they mean.

    A prompt or a path needs no quoting for Hydra's sake, whatever brackets, commas and blanks it holds.
    """
    if text == "null":
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            override = OverridesParser.create().parse_override(f"text={text}")
        except HydraException:
            return literal(text)
        if isinstance(override._value, QuotedString):
            return literal(override._value.text)
    return literal(text)


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause) or str(error) or type(error).__name__).strip().splitlines()[0]
