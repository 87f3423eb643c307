"""`model.weights=DIR`: the directory's own config.json is the architecture. Free of torch and transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.checkpoint.headers import INDEX, SINGLE, by_layer, mismatches, read_folder, unused
from engine.checkpoint.index import load_index
from engine.checkpoint.paths import is_checkpoint, newest
from engine.checkpoint.quantised import CONFIG_KEY, SUPPORTED, find, logical, quantization_of, unsupported, wrong_scales
from engine.checkpoint.swap import aside_of
from engine.compose import family_folder
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.lora.adapter import CONFIG as ADAPTER_CONFIG
from engine.lora.adapter import MODEL as ADAPTER_MODEL
from engine.lora.adapter import base_of, is_adapter, place_adapters, read_adapter
from engine.mtp import held_layers
from engine.published import wrong_types
from engine.schema import MODEL_ONLY_KEYS

CONFIG = "config.json"
MODEL_FILES = f"{CONFIG} and *.safetensors"
HOLDS = {"task.lora.adapter": f"{ADAPTER_CONFIG} and {ADAPTER_MODEL}"}  # settings of something else than a model
WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")
ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # that transformers 5 moved into rope_parameters
# Published keys that change no tensor and no value of a forward pass: a run may set them beside any weights.
FREE_KEYS = {"initializer_range", "attention_dropout", "bos_token_id", "eos_token_id"}
FREE_KEYS |= {"router_aux_loss_coef", "output_router_logits"}
FREE_KEYS |= {"dropout", "activation_dropout", "drop_path_rate", "head_dropout", "domain_ids"}


def find_weights(path: str, setting: str = "model.weights") -> Path:
    """The folder that holds config.json and the weights: a Hugging Face directory, a sharded checkpoint of ours, or
    within a run folder its hf/ or its newest checkpoint. Links are followed, since `latest` moves. UserError if none.
    """
    folder, right = Path(path).expanduser(), f"it should be a directory with {HOLDS.get(setting, MODEL_FILES)}"
    if not folder.is_dir():
        hub = path.count("/") == 1 and path[0] not in "/.~"
        hint = "; models are not downloaded, name a directory that is here" if hub else ""
        what = "a file" if folder.is_file() else "no such directory"
        raise UserError(f"{setting}={path}: {what}; {right}{hint}")
    folder = folder.resolve()
    if (folder / CONFIG).is_file() or is_adapter(folder):
        return folder
    exported = folder / "hf" if (folder / "hf").exists() else aside_of(folder / "hf")
    inside = exported if (exported / CONFIG).is_file() or is_adapter(exported) else newest(folder)
    if inside is None:
        kind = (
            "a run folder without hf/ and without a complete checkpoint"
            if (folder / "config.yaml").is_file()
            else (f"there is no {HOLDS.get(setting, CONFIG).split()[0]} in it")
        )
        raise UserError(f"{setting}={path}: {kind}; {right}")
    return inside


def read_architecture(folder: Path, family: Family) -> Any:
    """The family's config class filled from a directory's config.json; absent keys have the reference's defaults.

    Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). The model's name is
    that of the family's size with the same architecture, or `custom`.
    Raises UserError for another family's config and for values of a wrong type.
    """
    path = (folder if (folder / CONFIG).is_file() else base_of(folder)) / CONFIG
    published = _read_json(path)
    if "model_type" not in published and isinstance(published.get("type"), str):
        published["model_type"] = published["type"]  # as lerobot calls it
    if published.get("model_type") not in family.model_types:
        raise UserError(
            f"{path}: model_type is {published.get('model_type')!r}, and the {family.name} family is "
            f"{' or '.join(map(repr, sorted(family.model_types)))}; use the family that these weights belong to"
        )
    if (quantised := published.get(CONFIG_KEY)) and (problem := unsupported(quantised)):
        raise UserError(
            f"{path}: {CONFIG_KEY}: {problem} is not supported ({SUPPORTED}); name the directory of the model in bf16"
        )
    cls = load_dotted(family.of(published["model_type"]).config)
    known = {f.name for f in dataclasses.fields(cls)} - set(MODEL_ONLY_KEYS)
    for theirs, ours in getattr(cls, "SPELLINGS", {}).items():
        if theirs in published:
            published.setdefault(ours, published[theirs])
    try:
        published = getattr(cls, "respell", dict)(published)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    values = {key: value for key, value in _rope(published).items() if key in known}
    typed = {key: value for key, value in values.items() if key != "eos_token_id" or not _ids(value)}
    if problems := [f"{path}: {line}" for line in wrong_types(cls, typed)]:
        raise UserError("\n".join(problems))
    if isinstance(values.get("eos_token_id"), list):
        # Several ends of text: generation_config.json keeps them all, training needs one.
        if outside := [i for i in values["eos_token_id"] if not 0 <= i < values.get("vocab_size", i + 1)]:
            size = values["vocab_size"]
            raise UserError(f"{path}: eos_token_id={outside[0]} is no token of vocab_size={size}; it must be below it")
        values["eos_token_id"] = next(iter(values["eos_token_id"]), None)
    layers = published.get("layer_types") or ["full_attention"]
    kinds = set(map(str, layers if isinstance(layers, list) else [layers]))
    if kinds - {"full_attention", *getattr(cls, "LAYER_TYPES", ())} and not values.get("use_sliding_window"):
        raise UserError(f"{path}: layer_types holds {', '.join(sorted(kinds))} but use_sliding_window is not true")
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), {**values, "name": "custom"}))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UserError(f"{path}: {key}={values.get(str(key))!r} is not what the key takes") from None
    if "sliding_attention" in kinds and layers != _layer_types(model):
        raise UserError(
            f"{path}: layer_types holds other layers with a window than use_sliding_window and max_window_layers "
            f"make: {', '.join(_layer_types(model))}"
        )
    model.name = _size_name(model, family)
    model.mtp_layers = held_layers(_tensor_names(folder), family.of(published["model_type"]), model)
    return model


def _layer_types(model: Any) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in model.windows()]


def _tensor_names(folder: Path) -> set[str]:
    """Of the tensors of a weights directory or a checkpoint, or of an adapter's base; none where there are no files."""
    if is_adapter(folder):
        return _tensor_names(base_of(folder))
    if is_checkpoint(folder):
        return set(load_index(folder).shapes("param"))
    infos = read_folder(folder) if any((folder / name).is_file() for name in (SINGLE, INDEX)) else {}
    return set(logical(infos, find(infos)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _ids(value: Any) -> bool:
    """Several tokens that end a text, as many files have them."""
    return isinstance(value, list) and all(type(token) is int for token in value)


def _rope(published: dict[str, Any]) -> dict[str, Any]:
    """The published keys with rotary settings spelled as transformers 4 does."""
    parameters = published.get("rope_parameters")
    if not isinstance(parameters, dict):
        return published
    scaling = {key: value for key, value in parameters.items() if key not in ROPE_KEYS}
    plain = scaling.get("rope_type", "default") == "default"
    own = {key: parameters[key] for key in ROPE_KEYS if key in parameters}
    return published | own | {"rope_scaling": None if plain else scaling}


def free_keys(model: Any) -> set[str]:
    """Keys that a run may set beside any weights: `FREE_KEYS`, and those that the family's config class calls free."""
    return FREE_KEYS | {*getattr(model, "FREE", ())}


def architecture(model: Any) -> dict[str, Any]:
    """The keys that make two models the same or different."""
    skipped = {*MODEL_ONLY_KEYS, *free_keys(model)} | (
        set() if getattr(model, "use_sliding_window", False) else {"max_window_layers", "sliding_window"}
    )
    return {key: value for key, value in vars(model).items() if key not in skipped}


def differences(mine: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """Architecture keys in which two models differ, with both values."""
    a, b = architecture(mine), architecture(theirs)
    return [(key, a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)]


def _size_name(model: Any, family: Family) -> str:
    for file in sorted((family_folder(family) / "model").glob("*.yaml")):
        keys = yaml.safe_load(file.read_text())
        known = {f.name for f in dataclasses.fields(model)}
        if keys.keys() <= known and not differences(model, type(model)(**keys)):
            return file.stem
    return "custom"


def adopt(model: Any, named: dict[str, str], family: Family, folder: Path, setting: str) -> Any:
    """The architecture of `folder`, with the user's own free keys.

    `named` is what the user spelled out: a size or a key that says something else is a UserError naming both values.
    """
    theirs = read_architecture(folder, family)
    mine = {key.partition(".")[2] for key in named if key.startswith("model.")} - set(MODEL_ONLY_KEYS)
    sized = "model" in named
    conflicts = [d for d in differences(model, theirs) if sized or d[0] in mine]
    if conflicts:
        named_here = ", ".join(sorted({f"model.{k}" if k in mine else f"model={model.name}" for k, _, _ in conflicts}))
        pairs = ", ".join(f"{key}={a} against {b}" for key, a, b in conflicts)
        raise UserError(f"{named_here} disagrees with {folder / CONFIG}: {pairs}; leave it out, and {setting} decides")
    for key in mine & free_keys(model):
        setattr(theirs, key, getattr(model, key))
    if sized:
        theirs.name = model.name
    if model.mtp_layers is not None:
        theirs.mtp_layers = model.mtp_layers
    return theirs


def _dtype_problems(dtypes: dict[str, str], aliases: dict[str, str]) -> list[str]:
    """Tensors whose numbers are no weights of ours: integers, eight-bit floats, and a tie of two different types."""
    lines = []
    for dtype in sorted({*dtypes.values()} - set(WEIGHT_DTYPES)):
        names = by_layer([name for name, has in dtypes.items() if has == dtype])
        lines += [f"wrong type: {name} has dtype {dtype}; {', '.join(WEIGHT_DTYPES)} are weights" for name in names]
    for alias, target in aliases.items():
        mine, theirs = dtypes.get(alias), dtypes.get(target)
        if mine and theirs and mine != theirs:
            lines.append(f"untied: {alias} is {mine} and {target} is {theirs}, but tie_word_embeddings makes them one")
    return lines


def check_tensors(folder: Path, family: Family, model: Any) -> list[str]:
    """Compare the files of a weights folder with what the model needs; names of tensors it has no use for.

    Raises UserError, everything that is wrong at once.
    """
    weights = load_dotted(family.weights)(model)
    if is_adapter(folder):
        place_adapters(read_adapter(folder), weights)
        return check_tensors(base_of(folder), family, model)
    problems: list[str] = []
    if is_checkpoint(folder):
        found = load_index(folder).shapes("param")
    else:
        stored = read_folder(folder)
        quantised = find(stored, quantization_of(folder))
        infos = logical(stored, quantised)
        found = {n: info.shape[::-1] if n in weights.transposed else info.shape for n, info in infos.items()}
        known = {*weights.published, *weights.aliases} - set(quantised)
        problems += _dtype_problems({n: info.dtype for n, info in infos.items() if n in known}, weights.aliases)
        problems += wrong_scales(stored, quantised)
    if problems := [*mismatches(found, weights.published, weights.aliases, weights.stand_ins), *problems]:
        raise UserError(
            f"{folder}: these weights are not those of its {CONFIG}:" + "".join(f"\n  {p}" for p in problems)
        )
    return unused(found, weights.published, weights.aliases)
