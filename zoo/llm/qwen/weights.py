"""Where each published Qwen tensor lives in the Megatron model, and in the reference, Qwen2. Free of torch.

The published projection of queries, keys and values is one, each a third of it; `mlp.w2` is the gate and `mlp.w1` up.
"""

from __future__ import annotations

from engine.checkpoint.weight_map import Rows, Rule, Shape, WeightMap
from engine.llm.parts import Part, decoder_map, gated_mlp, matrix
from zoo.qwen.config import QwenConfig

# The reference's names, within a layer and outside, of tensors that it holds as they are published.
LAYER = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.w2": "mlp.gate_proj",
    "mlp.w1": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
OUTSIDE = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm"}


def weight_map(config: QwenConfig) -> WeightMap:
    """The weight map of one configuration."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    parts = [
        matrix("ln_1.weight", "input_layernorm.weight", (hidden,)),
        matrix("ln_2.weight", "pre_mlp_layernorm.weight", (hidden,)),
        matrix("attn.c_proj.weight", "self_attention.linear_proj.weight", (hidden, hidden), "columns"),
        *gated_mlp(hidden, config.intermediate_size // config.WIDTHS, names=("w2", "w1", "c_proj")),
    ]
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    stacked = [_stacked(config, "weight", (hidden,)), _stacked(config, "bias", ())]
    layer = [*parts, *stacked, Part({}, [], _renamed(LAYER, {name: shape[0] for name, shape in shapes.items()}))]
    return decoder_map(
        [layer] * config.num_hidden_layers,
        vocab_size=vocabulary,
        hidden=hidden,
        tied=config.tie_word_embeddings,
        layer="transformer.h.{i}.",
        reference="model.layers.{i}.",
        embedding="transformer.wte.weight",
        norm="transformer.ln_f.weight",
        native=_renamed(OUTSIDE, {"transformer.wte.weight": vocabulary, "transformer.ln_f.weight": hidden}),
    )


def _stacked(config: QwenConfig, suffix: str, rest: Shape) -> Part:
    """Queries, keys and values. Megatron keeps each head's together, the reference each kind by itself."""
    name, hidden, head = f"attn.c_attn.{suffix}", config.hidden_size, config.kv_channels

    def by_head(tp: int) -> list[Rows]:
        return [(name, kind * hidden + h * head, head) for h in range(config.num_attention_heads) for kind in range(3)]

    def third(kind: int) -> list[Rows]:
        return [(name, kind * hidden, hidden)]

    native = [Rule(f"self_attn.{p}_proj.{suffix}", lambda tp, kind=kind: third(kind)) for kind, p in enumerate("qkv")]
    return Part({name: (3 * hidden, *rest)}, [Rule(f"self_attention.linear_qkv.{suffix}", by_head, "rows")], native)


def _renamed(names: dict[str, str], heights: dict[str, int]) -> list[Rule]:
    """Rules of the reference's weights that are whole published ones."""

    def whole(name: str) -> list[Rows]:
        return [(name, 0, heights[name])]

    return [Rule(f"{theirs}.weight", lambda tp, name=f"{ours}.weight": whole(name)) for ours, theirs in names.items()]
