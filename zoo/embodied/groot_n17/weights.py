"""GR00T's tensors under the names of NVIDIA's checkpoints, and the other names that they have. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

from engine.checkpoint.weight_map import WeightMap
from engine.policy.groot.weights import Tensors, by_prefix, frozen, head_tensors, linear, norm, qwen_tensors
from zoo.groot_n17.config import GrootN17Config

LEROBOT = "_groot_model."  # before every name of a policy that lerobot trained
BACKBONE = "backbone.model.model."
LANGUAGE = f"{BACKBONE}language_model."
VISION = f"{BACKBONE}visual."
EMBEDDING = f"{LANGUAGE}embed_tokens.weight"
NORM = f"{LANGUAGE}norm.weight"
OUTPUT = "backbone.model.lm_head.weight"  # a copy of the embedding


def weight_map(model: GrootN17Config) -> WeightMap:
    """What a published checkpoint stores. The language model's last norm is carried along: nothing reads it."""
    published = {**_vision(model), **_language(model), **head_tensors(model)}
    vision, language = (by_prefix(published, prefix) for prefix in (VISION, LANGUAGE))
    still = frozen(model, published, vision, language, f"{LANGUAGE}layers.")
    return WeightMap(
        published=published,
        rules=(),
        num_layers=model.select_layer,
        aliases=aliases(published, {OUTPUT: EMBEDDING}),
        unlearned=frozenset(still) - {NORM},
        kept=frozenset({NORM}),
    )


def aliases(published: Iterable[str], copies: dict[str, str]) -> dict[str, str]:
    """lerobot's names, and those of tensors that repeat another."""
    return copies | {f"{LEROBOT}{name}": copies.get(name, name) for name in (*published, *copies)}


def _language(model: GrootN17Config) -> Tensors:
    sizes = (model.text_heads, model.text_kv_heads, model.text_head_dim, model.text_mlp_dim)
    return qwen_tensors(LANGUAGE, model, *sizes)


def _vision(model: GrootN17Config) -> Tensors:
    width, size, merged = model.vision_width, model.patch_size, model.vision_width * model.spatial_merge_size**2
    tensors: Tensors = {
        f"{VISION}patch_embed.proj.weight": (width, 3, model.temporal_patch_size, size, size),
        f"{VISION}patch_embed.proj.bias": (width,),
        f"{VISION}pos_embed.weight": (model.num_position_embeddings, width),
    }
    for block in (f"{VISION}blocks.{number}." for number in range(model.vision_depth)):
        tensors |= norm(f"{block}norm1", width) | norm(f"{block}norm2", width)
        tensors |= linear(f"{block}attn.qkv", width, 3 * width) | linear(f"{block}attn.proj", width, width)
        tensors |= linear(f"{block}mlp.linear_fc1", width, model.vision_mlp_dim)
        tensors |= linear(f"{block}mlp.linear_fc2", model.vision_mlp_dim, width)
    deep = [f"{VISION}deepstack_merger_list.{number}." for number in range(len(model.deepstack_visual_indexes))]
    for merger, normed in ((f"{VISION}merger.", width), *((name, merged) for name in deep)):
        tensors |= norm(f"{merger}norm", normed) | linear(f"{merger}linear_fc1", merged, merged)
        tensors |= linear(f"{merger}linear_fc2", merged, model.backbone_embedding_dim)
    return tensors
