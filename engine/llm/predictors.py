"""A weight map's layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.checkpoint.weight_map import Rows, Rule, WeightMap
from engine.errors import UserError
from engine.llm.config import DecoderConfig
from engine.llm.parts import Part, matrix

PREDICTOR = "predictors.{i}."


@dataclass(frozen=True)
class PredictorNames:
    """How a family publishes its layers for multi-token prediction; `{i}` is the number of one, from `first` on."""

    layer: str  # prefix of what a layer of the decoder has too
    token_norm: str  # of the embedding of the token ahead; this and the following are whole names
    hidden_norm: str  # of the hidden state before
    projection: str  # of both side by side
    norm: str  # before the head
    first: int = 0
    most: int | None = None  # layers that the names can tell apart
    embedding: str | None = None  # names of copies that some checkpoints hold
    head: str | None = None


def numbered(layers: int) -> PredictorNames:
    """The names of DeepSeek-V3 and GLM: layers that follow the decoder's `layers`."""
    one = "model.layers.{i}."
    return PredictorNames(
        layer=one,
        token_norm=one + "enorm.weight",
        hidden_norm=one + "hnorm.weight",
        projection=one + "eh_proj.weight",
        norm=one + "shared_head.norm.weight",
        first=layers,
        embedding=one + "embed_tokens.weight",
        head=one + "shared_head.head.weight",
    )


QWEN = PredictorNames(  # Qwen3-Next
    layer="mtp.layers.{i}.",
    token_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    norm="mtp.norm.weight",
    most=1,
)
MIMO = PredictorNames(  # MiMo-7B, whose projection takes the hidden state first
    layer="model.mtp_layers.{i}.",
    token_norm="model.mtp_layers.{i}.token_layernorm.weight",
    hidden_norm="model.mtp_layers.{i}.hidden_layernorm.weight",
    projection="model.mtp_layers.{i}.input_proj.weight",
    norm="model.mtp_layers.{i}.final_layernorm.weight",
)
MIMO_V2 = PredictorNames(
    layer="model.mtp.layers.{i}.",
    token_norm="model.mtp.layers.{i}.enorm.weight",
    hidden_norm="model.mtp.layers.{i}.hnorm.weight",
    projection="model.mtp.layers.{i}.eh_proj.weight",
    norm="model.mtp.layers.{i}.final_layernorm.weight",
)


def with_predictors(
    weight_map: WeightMap,
    config: DecoderConfig,
    names: PredictorNames,
    layers: Sequence[Sequence[Part]],
    *,
    embedding: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
) -> WeightMap:
    """The weight map with `config.mtp_layers` such layers, each with the parts of the decoder's `predictor_layer()`.

    UserError for more than the names can tell apart.
    """
    count = config.mtp_layers or 0
    if not count:
        return weight_map
    if names.most is not None and count > names.most:
        raise UserError(f"model.mtp_layers={count}: this family has names for {names.most} at most")
    layer = layers[config.predictor_layer()] if layers else ()  # a model without layers is refused elsewhere
    own = [(names.layer, "layer.", part) for part in layer]
    own += [("", "", part) for part in _besides(names, config.hidden_size)]
    tensors, buffers, unlearned = {}, set(weight_map.buffers), set(weight_map.unlearned)
    aliases, rules = dict(weight_map.aliases), {}
    copies = {names.embedding: embedding, names.head: weight_map.aliases.get(head, head)}
    for number in range(names.first, names.first + count):
        at = str(number)
        for published, megatron, part in own:
            shapes = {(published + name).replace("{i}", at): shape for name, shape in part.shapes.items()}
            tensors |= shapes
            buffers |= set(shapes) if part.buffer else set()
            unlearned |= set(shapes) if part.unlearned else set()
            for rule in part.rules:
                rules.setdefault(megatron + rule.megatron, _whole(rule, PREDICTOR + megatron, published, names.first))
        aliases |= {copy.replace("{i}", at): name for copy, name in copies.items() if copy}
    return replace(
        weight_map,
        published=weight_map.published | tensors,
        rules=(*weight_map.rules, *rules.values()),
        aliases=aliases,
        buffers=frozenset(buffers),
        unlearned=frozenset(unlearned),
        predictors=frozenset(tensors),
    )


def _besides(names: PredictorNames, hidden: int) -> list[Part]:
    """What such a layer has that a layer of the decoder has not."""
    return [
        matrix(names.token_norm, "enorm.weight", (hidden,)),
        matrix(names.hidden_norm, "hnorm.weight", (hidden,)),
        matrix(names.projection, "eh_proj.weight", (hidden, 2 * hidden), "rows"),
        matrix(names.norm, "final_layernorm.weight", (hidden,)),
    ]


def _whole(rule: Rule, megatron: str, published: str, shift: int) -> Rule:
    """A part's rule with whole names."""

    def rows(tp: int) -> list[Rows]:
        return [(published + name, start, count) for name, start, count in rule.rows(tp)]

    return Rule(megatron + rule.megatron, rows, rule.shard, shift)
