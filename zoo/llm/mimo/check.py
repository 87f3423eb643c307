"""Published keys that no MiMo here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import check as shared
from engine.llm import qwen2
from zoo.mimo.config import FULL, WINDOW, MiMoConfig, MiMoV2FlashConfig


def check(model: MiMoConfig | MiMoV2FlashConfig, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    if isinstance(model, MiMoConfig):
        yield from qwen2.check(model, backend)
        return
    yield from shared.decoder(model, backend)
    yield from shared.topk(model, "num_experts_per_tok", "n_routed_experts")
    yield from _layers(model)
    for kind in sorted({*model.layer_types} & {FULL, WINDOW}):
        yield from _rope(model, kind)
    if model.n_group > 1 and (model.n_routed_experts % model.n_group or not 1 <= model.topk_group <= model.n_group):
        yield (
            f"model.n_group={model.n_group} must divide model.n_routed_experts={model.n_routed_experts}, and "
            f"model.topk_group={model.topk_group} must be from 1 to it"
        )


def _layers(model: MiMoV2FlashConfig) -> Iterator[str]:
    for key, kinds in (("layer_types", (FULL, WINDOW)), ("mlp_layer_types", ("dense", "sparse"))):
        values = getattr(model, key)
        if len(values) != model.num_hidden_layers:
            yield f"model.{key} names {len(values)} layers and model.num_hidden_layers is {model.num_hidden_layers}"
        if wrong := sorted({*values} - {*kinds}):
            yield f"model.{key} holds {wrong[0]}; it can hold {' and '.join(kinds)}"
    if "sparse" not in model.mlp_layer_types:
        yield "model.mlp_layer_types: no layer is sparse; at least one must have experts"
    groups = 2 * model.num_key_value_heads
    if WINDOW in model.layer_types and model.num_attention_heads % groups:
        yield (
            f"model.num_attention_heads={model.num_attention_heads}: layers with a window have twice "
            f"model.num_key_value_heads, {groups}, which must divide it"
        )
    if model.sliding_window < 1:
        yield f"model.sliding_window={model.sliding_window}: it must be at least 1"


def _rope(model: MiMoV2FlashConfig, kind: str) -> Iterator[str]:
    parameters = model.rope_parameters.get(kind)
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        yield f"model.rope_parameters.{kind} needs rope_theta"
    elif parameters.get("rope_type", "default") != "default":
        yield f"model.rope_parameters.{kind}.rope_type={parameters['rope_type']}: only 'default' is there"
    elif not 2 <= model.rotary_channels(kind) <= model.head_dim or model.rotary_channels(kind) % 2:
        yield (
            f"model.rope_parameters.{kind}.partial_rotary_factor={parameters.get('partial_rotary_factor')}: of "
            f"model.head_dim={model.head_dim} an even number of channels must be rotated"
        )
