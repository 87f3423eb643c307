"""A checkpoint of adapters in PEFT's format: what its files hold and what its config says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.checkpoint.card import ADAPTER, Card
from engine.checkpoint.index import Shape
from engine.checkpoint.reader import ShardedSource
from engine.errors import UserError
from engine.lora.adapter import BLOCKS, FUSED
from engine.lora.fused import Fused, Place, fused_places, plain_place, seats
from engine.lora.names import PREFIX, adapter_layers, last, layer_of

BEFORE = re.compile(r".*?\b(layers|h)\.\d+\.")  # of a name, what differs from layer to layer


class PeftForm:
    """Adapters of published layers, put together as PEFT stores them. `metadata` is that of their file."""

    def __init__(self, source: ShardedSource, places: dict[str, Place], metadata: dict[str, str]) -> None:
        self.folder, self.metadata = source.folder, metadata
        self._source, self._places, self._published = source, places, source.index.shapes()
        self.shapes: dict[str, Shape] = {}
        self._members: dict[str, list[str]] = {}
        for layer, place in places.items():
            self.shapes |= place.stored_shapes()
            self._members.setdefault(place.stored, []).append(layer)

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        """A tensor under the name that PEFT has for it; one of several layers is read whole, whatever is asked for."""
        members = self._members[layer_of(name)]
        if self._places[members[0]].plain:
            return self._source.read(kind, name, shape, offset, extent)
        whole: Tensor | None = None
        for layer in members:
            published = name.replace(layer_of(name), layer)
            own = self._published[published]
            tensor = self._source.read(kind, published, own, (0, 0), own)
            whole = tensor.new_zeros(shape) if whole is None else whole
            self._places[layer].part(name, whole).copy_(tensor)
        assert whole is not None, "every pair has members"
        return whole


def in_pefts_form(source: ShardedSource, card: Card) -> tuple[PeftForm, Card]:
    """The adapters of a checkpoint, and its card, as PEFT has them. UserError if it lacks a tensor."""
    shapes, config = source.index.shapes(), json.loads(card.texts[ADAPTER])
    if missing := [name for name in card.stored if name.removeprefix(PREFIX) not in shapes]:
        raise UserError(f"{source.folder}: holds no param '{missing[0]}'")
    fused = [Fused(**one) for one in config.pop(FUSED, [])]
    layers, r, scale = adapter_layers(shapes), config["r"], config["lora_alpha"] / config["r"]
    seated = seats(layers, fused)
    blocks = list(dict.fromkeys(last(layer) for layer in seated))
    ranks = {s.parameter: r * sum(last(m) in blocks for m in s.fused.members) for s in seated.values()}
    experts = fused_places(layers, fused, lambda _: True, lambda parameter: (ranks[parameter], scale), blocks)
    places = {layer: experts.get(layer) or plain_place(layer, shape, r, scale) for layer, shape in layers.items()}
    form = PeftForm(source, places, {BLOCKS: ",".join(blocks)} if blocks else {})
    text = json.dumps(config | _targets(config, places, fused, ranks), indent=2) + "\n"
    return form, replace(
        card, stored=dict.fromkeys((PREFIX + name for name in form.shapes), "F32"), texts=card.texts | {ADAPTER: text}
    )


def _targets(
    config: dict[str, Any], places: dict[str, Place], fused: list[Fused], ranks: dict[str, int]
) -> dict[str, Any]:
    """What PEFT's config says of the layers of a model with experts. `ranks` are those of the experts' parameters.

    PEFT takes the last name of an expert's matrix among `target_modules` for all experts and leaves dense layers of
    that name out, so these are named as parameters too. It has no dropout for parameters.
    """
    names = {last(member) for one in fused for member in one.members}
    dense = [layer for layer, place in places.items() if place.plain and last(layer) in names]
    parameters = list(dict.fromkeys(BEFORE.sub("", name) for name in [*ranks, *(f"{layer}.weight" for layer in dense)]))
    if not parameters:
        return {}
    r, alpha = config["r"], config["lora_alpha"]
    wider = {re.escape(BEFORE.sub("", name)): rank for name, rank in ranks.items() if rank != r}
    return {
        "lora_dropout": 0.0,
        "target_modules": [name for name in config["target_modules"] if name not in names],
        "target_parameters": parameters,
        "rank_pattern": wider,
        "alpha_pattern": {name: alpha * (rank // r) for name, rank in wider.items()},
    }
