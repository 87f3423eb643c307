"""Pi0.5's tensors under the names that lerobot publishes, and the other names that checkpoints have. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import Shape, WeightMap
from zoo.pi05.config import Pi05Config

PREFIX = "model."  # of lerobot's names, against openpi's
BOTH = "model.paligemma_with_expert."
VISION = f"{BOTH}paligemma.model.vision_tower."
LANGUAGE = f"{BOTH}paligemma.model.language_model."
EXPERT = f"{BOTH}gemma_expert.model."
HEADS = (f"{BOTH}paligemma.lm_head.weight", f"{BOTH}gemma_expert.lm_head.weight")  # no loss reads them
EMBEDDING = f"{LANGUAGE}embed_tokens.weight"


def weight_map(model: Pi05Config) -> WeightMap:
    """What a published checkpoint stores.

    The last layer of the language model is read for its keys and values alone, so that the rest of it has no gradient.
    The two output heads are carried along unchanged; PaliGemma's is the embedding's copy, and may be the only one.
    """
    published = {
        HEADS[0]: (model.vocab_size, model.width),
        **_vision(model),
        f"{BOTH}paligemma.model.multi_modal_projector.linear.weight": (model.width, model.vision_width),
        f"{BOTH}paligemma.model.multi_modal_projector.linear.bias": (model.width,),
        EMBEDDING: (model.vocab_size, model.width),
        **_gemma(model, LANGUAGE, model.width, model.mlp_dim, None),
        HEADS[1]: (model.vocab_size, model.expert_width),
        **_gemma(model, EXPERT, model.expert_width, model.expert_mlp_dim, model.expert_width),
        **_linear("model.action_in_proj", model.max_action_dim, model.expert_width),
        **_linear("model.action_out_proj", model.expert_width, model.max_action_dim),
        **_linear("model.time_mlp_in", model.expert_width, model.expert_width),
        **_linear("model.time_mlp_out", model.expert_width, model.expert_width),
    }
    last = f"{LANGUAGE}layers.{model.depth - 1}."
    idle = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    unlearned = {*(f"{last}{name}.weight" for name in (*idle, "post_attention_layernorm")), f"{LANGUAGE}norm.weight"}
    return WeightMap(
        published=published,
        rules=(),
        num_layers=model.depth,
        aliases=_aliases(published),
        unlearned=frozenset(unlearned),
        idle=frozenset(unlearned),
        kept=frozenset(HEADS),
        stand_ins={HEADS[0]: EMBEDDING, EMBEDDING: HEADS[0]},
    )


def _vision(model: Pi05Config) -> dict[str, Shape]:
    width = model.vision_width
    tensors = {
        f"{VISION}embeddings.patch_embedding.weight": (width, 3, model.patch_size, model.patch_size),
        f"{VISION}embeddings.patch_embedding.bias": (width,),
        f"{VISION}embeddings.position_embedding.weight": (model.patches, width),
    }
    for layer in (f"{VISION}encoder.layers.{i}." for i in range(model.vision_depth)):
        tensors |= _norm(f"{layer}layer_norm1", width)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            tensors |= _linear(f"{layer}self_attn.{name}", width, width)
        tensors |= _norm(f"{layer}layer_norm2", width)
        tensors |= _linear(f"{layer}mlp.fc1", width, model.vision_mlp_dim)
        tensors |= _linear(f"{layer}mlp.fc2", model.vision_mlp_dim, width)
    return tensors | _norm(f"{VISION}post_layernorm", width)


def _gemma(model: Pi05Config, prefix: str, width: int, mlp_dim: int, cond: int | None) -> dict[str, Shape]:
    """A stack of Gemma layers; with `cond`, its norms are made of a condition of that width."""
    heads, groups = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = {"weight": (width,)} if cond is None else {"dense.weight": (3 * width, cond), "dense.bias": (3 * width,)}
    tensors: dict[str, Shape] = {}
    for layer in (f"{prefix}layers.{i}." for i in range(model.depth)):
        tensors |= {
            f"{layer}self_attn.q_proj.weight": (heads, width),
            f"{layer}self_attn.k_proj.weight": (groups, width),
            f"{layer}self_attn.v_proj.weight": (groups, width),
            f"{layer}self_attn.o_proj.weight": (width, heads),
            f"{layer}mlp.gate_proj.weight": (mlp_dim, width),
            f"{layer}mlp.up_proj.weight": (mlp_dim, width),
            f"{layer}mlp.down_proj.weight": (width, mlp_dim),
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= {f"{layer}{norm}.{name}": shape for name, shape in norms.items()}
    return tensors | {f"{prefix}norm.{name}": shape for name, shape in norms.items()}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inner: int, outer: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outer, inner), f"{name}.bias": (outer,)}


def _aliases(published: dict[str, Shape]) -> dict[str, str]:
    """Other names of the same tensors: openpi's, older transformers' for the vision tower, pi0's for the time."""
    found: dict[str, str] = {}
    for name in published:
        names = {name}
        if name.startswith(VISION):
            names.add(name.replace("vision_tower.", "vision_tower.vision_model."))
        if name.startswith("model.time_mlp"):
            names.add(name.replace("model.time_mlp", "model.action_time_mlp"))
        names |= {other.removeprefix(PREFIX) for other in names}
        target = EMBEDDING if name == HEADS[0] else name  # openpi ties it
        found |= {other: target if other == name.removeprefix(PREFIX) else name for other in names - {name}}
    return found
