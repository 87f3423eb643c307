"""The frozen config of a run: written once by the controller, read by every worker. Needs OmegaConf, never Hydra."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.errors import UserError
from engine.family import Family, load_dotted, load_family
from engine.schema import JOBS, SCHEMA_VERSION, Run


def typed_run(family: Family, job: str | None = None) -> type[Run]:
    """`Run` with `model` (and `job`, if named) narrowed to their own classes, for OmegaConf to check against."""
    fields: list[tuple[str, type, Any]] = []
    narrowed = {"model": load_dotted(family.config)} | ({"job": JOBS[job]} if job else {})
    for name, cls in narrowed.items():
        fields.append((name, cls, dataclasses.field(default_factory=partial(defaults, cls))))
    return dataclasses.make_dataclass("Run", fields, bases=(Run,))


def defaults(cls: type) -> Any:
    """An instance that holds a dataclass's defaults as they are written.

    What `__post_init__` derives from them must not be there: it follows from what is merged over the defaults.
    """
    made = object.__new__(cls)
    for f in dataclasses.fields(cls):
        setattr(made, f.name, f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
    return made


def to_run(config: Any) -> Run:
    """A plain `Run` from an OmegaConf config of a `typed_run`. Raises OmegaConf's errors if a value is missing."""
    typed = OmegaConf.to_object(config)
    values = {f.name: getattr(typed, f.name) for f in dataclasses.fields(Run)}
    values["optim"].betas = tuple(values["optim"].betas)
    return Run(**values)


def to_yaml(run: Run) -> str:
    """The frozen config as text; `load_run` reads it back."""
    values = dataclasses.asdict(run)
    values["optim"]["betas"] = list(values["optim"]["betas"])
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def load_run(path: Path) -> Run:
    """The run of a frozen config.

    Raises UserError if the file is missing, is not a frozen config, was written by a newer version, or holds a key or
    a value that the schema does not allow.
    """
    values = _read(path)
    version = values.get("schema_version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: schema_version is {version!r}; this is not the frozen config of a run")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path}: has schema version {version}, and this Zooforge reads up to {SCHEMA_VERSION}; update Zooforge"
        )
    job = values.get("job") or {}
    name = job.get("name") if isinstance(job, dict) else None
    if name not in JOBS:
        raise UserError(f"{path}: job.name is {name!r}; the jobs are {', '.join(JOBS)}")
    try:
        model = values.get("model")
        model_type = model.get("model_type") if isinstance(model, dict) else None
        schema = OmegaConf.structured(typed_run(load_family(str(values.get("family"))).of(model_type), name))
        return to_run(OmegaConf.merge(schema, _literal(values)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {getattr(error, 'full_key', None)}: {str(error).splitlines()[0]}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a run folder holds its frozen config as config.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not readable as YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not the frozen config of a run")
    return values


def literal(text: str) -> str:
    """Text that OmegaConf takes as it is, also where it looks like an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _literal(value: Any) -> Any:
    # A frozen config has no interpolations left: a prompt may well hold "${".
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return value
