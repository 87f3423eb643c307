"""Where each published Qwen3 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint.weight_map import Rows, Rule, Shape, WeightMap
from zoo.qwen3.config import Qwen3MoeConfig, SharedKeys, has_experts

LAYER = "model.layers.{i}."
EXPERT = LAYER + "mlp.experts.{e}."
DECODER = "decoder.layers.{i}."


def published(config: SharedKeys) -> dict[str, Shape]:
    """Names and shapes that a published checkpoint stores. A tied head is not stored."""
    hidden, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    dense = _mlp("mlp.", hidden, ffn)
    if config.attention_bias:
        layer |= {
            f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", queries), ("k", keys), ("v", keys), ("o", hidden))
        }
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        mlp = _experts(config) if isinstance(config, Qwen3MoeConfig) and has_experts(config, i) else dense
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in (layer | mlp).items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _mlp(prefix: str, hidden: int, ffn: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


def _experts(config: Qwen3MoeConfig) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {"mlp.gate.weight": (config.num_experts, config.hidden_size)}
    for e in range(config.num_experts):
        tensors |= _mlp(f"mlp.experts.{e}.", config.hidden_size, config.moe_intermediate_size)
    return tensors


def weight_map(config: SharedKeys) -> WeightMap:
    """The weight map of one configuration."""
    tensors = published(config)
    head, groups = config.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups * head  # query rows for each group

    layers = [str(i) for i in range(config.num_hidden_layers)]

    def whole(name: str) -> list[Rows]:
        return [(name, 0, next(shape[0] for i in layers if (shape := tensors.get(name.replace("{i}", i)))))]

    def qkv(suffix: str) -> list[Rows]:
        # Megatron keeps each group's queries, key and value together.
        attention = LAYER + "self_attn."
        return [
            run
            for g in range(groups)
            for run in (
                (f"{attention}q_proj.{suffix}", g * queries, queries),
                (f"{attention}k_proj.{suffix}", g * head, head),
                (f"{attention}v_proj.{suffix}", g * head, head),
            )
        ]

    def gate_up(prefix: str, width: int) -> Callable[[int], list[Rows]]:
        def rows(tp: int) -> list[Rows]:
            share = width // tp
            return [(f"{prefix}{p}_proj.weight", rank * share, share) for rank in range(tp) for p in ("gate", "up")]

        return rows

    rules = [
        Rule("embedding.word_embeddings.weight", lambda tp: whole("model.embed_tokens.weight"), "rows"),
        Rule(DECODER + "input_layernorm.weight", lambda tp: whole(LAYER + "input_layernorm.weight")),
        Rule(DECODER + "self_attention.linear_qkv.weight", lambda tp: qkv("weight"), "rows"),
        Rule(DECODER + "self_attention.q_layernorm.weight", lambda tp: whole(LAYER + "self_attn.q_norm.weight")),
        Rule(DECODER + "self_attention.k_layernorm.weight", lambda tp: whole(LAYER + "self_attn.k_norm.weight")),
        Rule(
            DECODER + "self_attention.linear_proj.weight",
            lambda tp: whole(LAYER + "self_attn.o_proj.weight"),
            "columns",
        ),
        Rule(DECODER + "pre_mlp_layernorm.weight", lambda tp: whole(LAYER + "post_attention_layernorm.weight")),
        Rule(DECODER + "mlp.linear_fc1.weight", gate_up(LAYER + "mlp.", config.intermediate_size), "rows"),
        Rule(DECODER + "mlp.linear_fc2.weight", lambda tp: whole(LAYER + "mlp.down_proj.weight"), "columns"),
        Rule("decoder.final_layernorm.weight", lambda tp: whole("model.norm.weight")),
    ]
    native: list[Rule] = []
    if isinstance(config, Qwen3MoeConfig):
        width, hidden, experts = config.moe_intermediate_size, config.hidden_size, range(config.num_experts)
        local = DECODER + "mlp.experts.local_experts.{e}."
        rules += [
            Rule(DECODER + "mlp.router.weight", lambda tp: whole(LAYER + "mlp.gate.weight")),
            Rule(local + "linear_fc1.weight", gate_up(EXPERT, width), "rows"),
            Rule(local + "linear_fc2.weight", lambda tp: [(EXPERT + "down_proj.weight", 0, hidden)], "columns"),
        ]
        # The reference holds a layer's experts in two tensors [experts, rows, columns].
        fused = [EXPERT.replace("{e}", str(e)) for e in experts]
        native = [
            Rule(
                LAYER + "mlp.experts.gate_up_proj", lambda tp: [run for one in fused for run in gate_up(one, width)(1)]
            ),
            Rule(LAYER + "mlp.experts.down_proj", lambda tp: [(one + "down_proj.weight", 0, hidden) for one in fused]),
        ]
    if config.attention_bias:
        rules += [
            Rule(DECODER + "self_attention.linear_qkv.bias", lambda tp: qkv("bias"), "rows"),
            Rule(DECODER + "self_attention.linear_proj.bias", lambda tp: whole(LAYER + "self_attn.o_proj.bias")),
        ]
    tied = config.tie_word_embeddings
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    # With tied embeddings the last pipeline stage holds a copy under this name.
    rules.append(Rule("output_layer.weight", lambda tp: whole(output), "rows"))
    return WeightMap(
        published=tensors,
        rules=tuple(rules),
        num_layers=config.num_hidden_layers,
        native=tuple(native),
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )
