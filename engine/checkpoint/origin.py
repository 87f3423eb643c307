"""The card of a run, by where its weights come from: a checkpoint, a published directory, or nowhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.card import ADAPTER, CONFIG, Card, read_card, read_texts, tokenizer_files
from engine.checkpoint.config import DTYPE_OF, config_text, to_published
from engine.checkpoint.paths import find_checkpoint
from engine.checkpoint.sources import HFSource, is_hf
from engine.checkpoint.weight_map import WeightMap
from engine.family import Family, load_dotted
from engine.lora.adapter import base_of
from engine.lora.adapter import config_text as adapter_text
from engine.lora.fused import fused_of
from engine.lora.names import PREFIX, adapter_shapes, last, linear_layers, trained_adapters
from engine.schema import Run

GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def make_card(
    run: Run,
    family: Family,
    tokenizer: Path | None = None,
    eos_id: int | None = None,
    resumed: Path | None = None,
    kept: dict[str, str] | None = None,
) -> Card:
    """What this run's checkpoints and exports say of the model.

    `resumed` is the checkpoint that the run continues, `tokenizer` the folder of the run's own tokenizer and `eos_id`
    its end of text; `kept` are files that the model keeps of its data. A published directory's config.json, names and
    dtypes are kept as they are.
    """
    weight_map = load_dotted(family.weights)(run.model)
    if resumed is not None:
        card = read_card(resumed)
    elif trained_adapters(run, run.job.name):
        card = _adapter_card(run, family, weight_map)
    elif run.model.weights:
        card = _published_card(base_of(Path(run.model.weights)), family, weight_map)
    else:
        dtype = DTYPE_OF[run.precision.name]
        published = to_published(family, run.model)
        if published.get("eos_token_id") is None and eos_id is not None:
            published["eos_token_id"] = eos_id
        stored = {name: "F32" if name in weight_map.buffers else dtype for name in weight_map.published}
        card = Card(family.name, stored, texts={CONFIG: config_text(published, dtype)})
    texts = dict(card.texts) | (kept or {})
    texts.setdefault(CONFIG, config_text(to_published(family, run.model), DTYPE_OF[run.precision.name]))
    texts[CONFIG] = with_free_keys(texts[CONFIG], run.model)
    if family.native is None:
        texts.setdefault(GENERATION, generation_text(json.loads(texts[CONFIG])))
    names = {"aliases": weight_map.aliases, "buffers": weight_map.buffers, "transposed": weight_map.transposed}
    return replace(card, family=family.name, **names, texts=texts, tokenizer=tokenizer or card.tokenizer)


def with_free_keys(text: str, model: Any) -> str:
    """A config.json that says what the run chose of the keys that its family calls free; otherwise as it was."""
    config, usual = json.loads(text), type(model)
    chosen = {key: getattr(model, key) for key in getattr(usual, "FREE", ())}
    before = {key: config.get(key, getattr(usual(name=""), key)) for key in chosen}
    return text if chosen == before else json.dumps(config | chosen, indent=2, sort_keys=True) + "\n"


def _adapter_card(run: Run, family: Family, weight_map: WeightMap) -> Card:
    """Of a run that trains adapters: they are stored in fp32 under PEFT's names, and their config names the base."""
    base, settings = Path(run.model.weights), run.task.lora
    layers = linear_layers(weight_map.adaptable, settings.targets)
    targets = list(dict.fromkeys(last(layer) for layer in layers))
    task = "CAUSAL_LM" if family.native is None else None
    text = adapter_text(settings, targets, str(base), fused_of(weight_map), task)
    texts = _published_card(base, family, weight_map).texts | {ADAPTER: text}
    return Card(family.name, {PREFIX + name: "F32" for name in adapter_shapes(layers, settings.r)}, texts=texts)


def generation_text(config: dict[str, Any]) -> str:
    """A generation config that follows from the model's: its special tokens."""
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    return json.dumps({"_from_model_config": True} | ids, indent=2) + "\n"


def _published_card(path: Path, family: Family, weight_map: WeightMap) -> Card:
    if not is_hf(path):
        return read_card(find_checkpoint(path))
    source = HFSource(path)
    known = set(weight_map.published) | set(weight_map.aliases)
    stored = {name: dtype for name, dtype in source.dtypes.items() if name in known}
    return Card(family.name, stored, texts=read_texts(path), tokenizer=path if tokenizer_files(path) else None)
