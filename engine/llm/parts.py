"""A decoder's weight map from its parts: what a checkpoint stores of each, and where it lives in the Megatron model.

A part is written for one layer, with names relative to the layer on the published side and to `decoder.layers.{i}.` on
Megatron's; `decoder_map` puts layers together. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.checkpoint.weight_map import Rows, Rule, Shape, WeightMap

DECODER = "decoder.layers.{i}."


@dataclass(frozen=True)
class Part:
    """Published shapes of a part of a layer, and the rules of its Megatron and its fused reference parameters."""

    shapes: dict[str, Shape]
    rules: list[Rule]
    native: list[Rule] = field(default_factory=list)
    buffer: bool = False  # no gradient moves it, see `WeightMap.buffers`
    unlearned: bool = False  # see `WeightMap.unlearned`


def matrix(published: str, megatron: str, shape: Shape, shard: str = "whole") -> Part:
    """One tensor that both sides hold alike: a norm, a router, a projection with or without a bias."""
    return Part({published: shape}, [Rule(megatron, lambda tp: [(published, 0, shape[0])], shard)])


def layer_norms(hidden: int) -> list[Part]:
    """The two norms of a pre-norm layer."""
    return [
        matrix("input_layernorm.weight", "input_layernorm.weight", (hidden,)),
        matrix("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,)),
    ]


def grouped_attention(
    hidden: int,
    heads: int,
    groups: int,
    head: int,
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool | str = False,
    gate: bool = False,
    value: int | None = None,
    prefix: str = "self_attn.",
) -> list[Part]:
    """Attention with grouped queries: q, k, v and o projections, with biases and norms of each head if asked for.

    `qk_norm="all"` is a norm over all heads together; `value` is the width of a value where it is not that of a key.
    Megatron keeps each group's queries, key and value together. With `gate` the published q projection holds each
    head's query and then its gate; Megatron keeps a group's queries, then its gates.
    """
    queries, keys, gated, value = heads * head, groups * head, 1 + gate, value or head
    rows = {"q": queries * gated, "k": keys, "v": groups * value}
    each = {"q": queries // groups, "k": head, "v": value}  # rows of a group

    def qkv(suffix: str) -> list[Rows]:
        if not gate:
            return [(f"{prefix}{p}_proj.{suffix}", g * n, n) for g in range(groups) for p, n in each.items()]
        per = heads // groups
        runs = []
        for g in range(groups):
            own = range(g * per, (g + 1) * per)
            runs += [(f"{prefix}q_proj.{suffix}", (2 * h + half) * head, head) for half in range(2) for h in own]
            runs += [(f"{prefix}{p}_proj.{suffix}", g * head, head) for p in ("k", "v")]
        return runs

    def merged(suffix: str, rest: Shape) -> Part:
        shapes = {f"{prefix}{p}_proj.{suffix}": (n, *rest) for p, n in rows.items()}
        return Part(shapes, [Rule(f"self_attention.linear_qkv.{suffix}", lambda tp: qkv(suffix), "rows")])

    output, linear = f"{prefix}o_proj.", "self_attention.linear_proj."
    parts = [
        merged("weight", (hidden,)),
        matrix(output + "weight", linear + "weight", (hidden, heads * value), "columns"),
    ]
    if bias:
        parts.append(merged("bias", ()))
    if output_bias:
        parts.append(matrix(output + "bias", linear + "bias", (hidden,)))
    if qk_norm:
        widths = {"q": queries, "k": keys} if qk_norm == "all" else {"q": head, "k": head}
        parts += [
            matrix(f"{prefix}{p}_norm.weight", f"self_attention.{p}_layernorm.weight", (n,)) for p, n in widths.items()
        ]
    return parts


def sinks(published: str, heads: int, *, reference: str | None = None) -> Part:
    """The sink of each head. `reference` is the reference's own name where it differs from the published one."""

    def rows(tp: int) -> list[Rows]:
        return [(published, 0, heads)]

    native = [Rule(reference, rows)] if reference else []
    return Part({published: (heads,)}, [Rule("self_attention.core_attention.sinks", rows, "rows")], native)


def latent_attention(
    hidden: int,
    heads: int,
    *,
    query_rank: int | None,
    rank: int,
    plain: int,
    rotary: int,
    value: int,
    bias: bool = False,
    prefix: str = "self_attn.",
) -> list[Part]:
    """Multi-head latent attention (DeepSeek-V2): queries and what keys and values share come from narrow latents.

    A head's query and key have `plain` channels without and `rotary` with positions. `query_rank` None: queries come
    from the hidden states directly. `bias` is that of the projections to latents and of the output.
    """
    own = "self_attention.linear_"
    wide, down = heads * (plain + rotary), [("kv_a_proj_with_mqa", "kv_down_proj", rank + rotary)]
    parts = [
        matrix(f"{prefix}kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", (rank,)),
        matrix(f"{prefix}kv_b_proj.weight", f"{own}kv_up_proj.weight", (heads * (plain + value), rank), "rows"),
        matrix(f"{prefix}o_proj.weight", f"{own}proj.weight", (hidden, heads * value), "columns"),
    ]
    if query_rank is None:
        parts.append(matrix(f"{prefix}q_proj.weight", f"{own}q_proj.weight", (wide, hidden), "rows"))
    else:
        down.append(("q_a_proj", "q_down_proj", query_rank))
        parts += [
            matrix(f"{prefix}q_a_layernorm.weight", "self_attention.q_layernorm.weight", (query_rank,)),
            matrix(f"{prefix}q_b_proj.weight", f"{own}q_up_proj.weight", (wide, query_rank), "rows"),
        ]
    for published, megatron, rows in down:
        parts.append(matrix(f"{prefix}{published}.weight", f"{own}{megatron}.weight", (rows, hidden)))
        if bias:
            parts.append(matrix(f"{prefix}{published}.bias", f"{own}{megatron}.bias", (rows,)))
    if bias:
        parts.append(matrix(f"{prefix}o_proj.bias", f"{own}proj.bias", (hidden,)))
    return parts


def indexer(hidden: int, query_rank: int, heads: int, width: int, *, prefix: str = "self_attn.indexer.") -> list[Part]:
    """The lightning indexer of sparse attention (DeepSeek-V3.2), which the model's own loss has no gradient of."""
    own = "self_attention.indexer."
    shapes = {
        "wq_b.weight": (heads * width, query_rank),
        "wk.weight": (width, hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, hidden),
    }
    return [replace(matrix(prefix + name, own + name, shape), unlearned=True) for name, shape in shapes.items()]


GATED = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    hidden: int,
    width: int,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = GATED,
    megatron: str = "mlp.",
    bias: bool = False,
) -> list[Part]:
    """A gated MLP: gate, up and down. Megatron keeps a rank's share of the gate before its share of up."""
    gate, up, down = names

    def both(suffix: str) -> Part:
        def rows(tp: int) -> list[Rows]:
            share = width // tp
            return [(f"{prefix}{p}.{suffix}", rank * share, share) for rank in range(tp) for p in (gate, up)]

        rest = (hidden,) if suffix == "weight" else ()
        shapes = {f"{prefix}{p}.{suffix}": (width, *rest) for p in (gate, up)}
        return Part(shapes, [Rule(f"{megatron}linear_fc1.{suffix}", rows, "rows")])

    parts = [
        both("weight"),
        matrix(f"{prefix}{down}.weight", f"{megatron}linear_fc2.weight", (hidden, width), "columns"),
    ]
    if bias:
        parts += [both("bias"), matrix(f"{prefix}{down}.bias", f"{megatron}linear_fc2.bias", (hidden,))]
    return parts


def experts(
    hidden: int,
    width: int,
    count: int,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = GATED,
    router: str = "gate.weight",
    reference: str | None = None,
) -> list[Part]:
    """A router and its experts. transformers holds a layer's experts in two tensors [experts, rows, columns].

    `reference` is the prefix of the reference's own names where it differs from the published one.
    """
    one = f"{prefix}experts.{{e}}."
    shape = (count, hidden)
    parts = [matrix(prefix + router, "mlp.router.weight", shape)]
    if reference:
        parts[0].native.append(Rule(reference + router, lambda tp: [(prefix + router, 0, count)]))
    local = gated_mlp(hidden, width, prefix=one, names=names, megatron="mlp.experts.local_experts.{e}.")
    shapes = {
        name.replace("{e}", str(e)): shape
        for e in range(count)
        for part in local
        for name, shape in part.shapes.items()
    }
    gate, up, down = names

    def every(*projections: tuple[str, int]) -> list[Rows]:
        return [(f"{prefix}experts.{e}.{p}.weight", 0, n) for e in range(count) for p, n in projections]

    fused = f"{reference or prefix}experts."
    native = [
        Rule(fused + "gate_up_proj", lambda tp: every((gate, width), (up, width))),
        Rule(fused + "down_proj", lambda tp: every((down, hidden))),
    ]
    return [*parts, Part(shapes, [rule for part in local for rule in part.rules], native)]


def correction_bias(published: str, shape: Shape, *, reference: str | None = None) -> Part:
    """A router's correction bias, published as [experts] or [1, experts].

    `reference` is the reference's own name where it differs from the published one.
    """

    def rows(tp: int) -> list[Rows]:
        return [(published, 0, shape[0])]

    native = [Rule(reference, rows)] if reference else []
    return Part({published: shape}, [Rule("mlp.router.expert_bias", rows)], native, buffer=True)


def shared_expert(
    hidden: int,
    width: int,
    *,
    prefix: str = "mlp.shared_expert.",
    gate: str | None = None,
) -> list[Part]:
    """The expert that every token goes through; `gate` is the published name of what weighs it, if anything does."""
    parts = gated_mlp(hidden, width, prefix=prefix, megatron="mlp.shared_experts.")
    if gate:
        parts.append(matrix(gate, "mlp.shared_experts.gate_weight", (1, hidden)))
    return parts


def decoder_map(
    layers: Sequence[Sequence[Part]],
    *,
    vocab_size: int,
    hidden: int,
    tied: bool,
    layer: str = "model.layers.{i}.",
    reference: str | None = None,
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
    head: str = "lm_head.weight",
    native: Sequence[Rule] = (),
) -> WeightMap:
    """The weight map of a decoder, from the parts of each of its layers. `native` rules are added as they are.

    `reference` is a layer's prefix in the reference where that is another one than the published `layer`.
    """
    tensors: dict[str, Shape] = {embedding: (vocab_size, hidden)}
    rules: dict[str, Rule] = {}
    fused: dict[str, Rule] = {}
    buffers: set[str] = set()
    unlearned: set[str] = set()
    own: dict[tuple[str, int], Rule] = {}
    for i, parts in enumerate(layers):
        for part in parts:
            named = {layer.replace("{i}", str(i)) + name: shape for name, shape in part.shapes.items()}
            tensors |= named
            buffers |= set(named) if part.buffer else set()
            unlearned |= set(named) if part.unlearned else set()
            for rule in part.rules:
                whole = _of_layer(rule, DECODER, layer)
                if rules.setdefault(rule.megatron, whole).rows(1) != whole.rows(1):  # this layer is of another kind
                    own[whole.megatron, i] = _of_one(whole, i)
            for rule in part.native:
                fused.setdefault(rule.megatron, _of_layer(rule, reference or layer, layer))
    tensors[norm] = (hidden,)
    if not tied:
        tensors[head] = (vocab_size, hidden)

    def ends(megatron: str, name: str, shard: str) -> Rule:
        return Rule(megatron, lambda tp: [(name, 0, tensors[name][0])], shard)

    return WeightMap(
        published=tensors,
        rules=(
            ends("embedding.word_embeddings.weight", embedding, "rows"),
            *own.values(),
            *rules.values(),
            ends("decoder.final_layernorm.weight", norm, "whole"),
            # With tied embeddings the last pipeline stage holds a copy under this name.
            ends("output_layer.weight", embedding if tied else head, "rows"),
        ),
        num_layers=len(layers),
        native=(*fused.values(), *native),
        aliases={head: embedding} if tied else {},
        buffers=frozenset(buffers),
        unlearned=frozenset(unlearned),
    )


def _of_one(rule: Rule, layer: int) -> Rule:
    """A rule for one layer alone."""
    i = str(layer)
    return Rule(
        rule.megatron.replace("{i}", i),
        lambda tp: [(name.replace("{i}", i), start, count) for name, start, count in rule.rows(tp)],
        rule.shard,
    )


def _of_layer(rule: Rule, megatron: str, published: str) -> Rule:
    """A part's rule with whole names."""
    return Rule(
        megatron + rule.megatron,
        lambda tp: [(published + name, start, count) for name, start, count in rule.rows(tp)],
        rule.shard,
    )
