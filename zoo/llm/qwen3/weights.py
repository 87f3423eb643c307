"""Where each published Qwen3 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import Rows, Rule, Shape, WeightMap
from zoo.qwen3.config import Qwen3Config

LAYER = "model.layers.{i}."
DECODER = "decoder.layers.{i}."


def published(config: Qwen3Config) -> dict[str, Shape]:
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
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.attention_bias:
        layer |= {
            f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", queries), ("k", keys), ("v", keys), ("o", hidden))
        }
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def weight_map(config: Qwen3Config) -> WeightMap:
    """The weight map of one configuration."""
    tensors = published(config)
    head, groups = config.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups * head  # query rows for each group

    def whole(name: str) -> list[Rows]:
        return [(name, 0, tensors[name.replace("{i}", "0")][0])]

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

    def gate_up(tp: int) -> list[Rows]:
        share = config.intermediate_size // tp
        return [(f"{LAYER}mlp.{p}_proj.weight", rank * share, share) for rank in range(tp) for p in ("gate", "up")]

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
        Rule(DECODER + "mlp.linear_fc1.weight", gate_up, "rows"),
        Rule(DECODER + "mlp.linear_fc2.weight", lambda tp: whole(LAYER + "mlp.down_proj.weight"), "columns"),
        Rule("decoder.final_layernorm.weight", lambda tp: whole("model.norm.weight")),
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
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )
