"""GR00T N1.6's tensors. Free of torch.

The head's names are N1.7's. Of the backbone, public text names `backbone.model.{vision_model,language_model,mlp1}` and
the classes behind them: the names within are transformers' of that time, and no file was at hand to check them by.
"""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.policy.groot.weights import Tensors, by_prefix, frozen, head_tensors, linear, norm, qwen_tensors
from zoo.groot_n16.config import GrootN16Config

VISION = "backbone.model.vision_model.vision_model."
LANGUAGE = "backbone.model.language_model.model."
CONNECTOR = "backbone.model.mlp1."
EMBEDDING = f"{LANGUAGE}embed_tokens.weight"
OUTPUT = "backbone.model.language_model.lm_head.weight"  # a copy of the embedding


def weight_map(model: GrootN16Config) -> WeightMap:
    """What a checkpoint stores."""
    sizes = (model.text_heads, model.text_kv_heads, model.text_head_dim, model.text_mlp_dim)
    published = {
        **_vision(model),
        **_connector(model),
        **qwen_tensors(LANGUAGE, model, *sizes),
        **head_tensors(model, mask_token=True),
    }
    vision = by_prefix(published, VISION) | by_prefix(published, CONNECTOR)
    still = frozen(model, published, vision, by_prefix(published, LANGUAGE), f"{LANGUAGE}layers.")
    return WeightMap(
        published=published,
        rules=(),
        num_layers=model.select_layer,
        aliases={OUTPUT: EMBEDDING},
        unlearned=frozenset(still),
    )


def _vision(model: GrootN16Config) -> Tensors:
    width, patches = model.vision_width, (model.image_size // model.patch_size) ** 2
    tensors = linear(f"{VISION}embeddings.patch_embedding", 3 * model.patch_size**2, width)
    tensors |= {f"{VISION}embeddings.position_embedding.weight": (patches, width)}
    for layer in (f"{VISION}encoder.layers.{number}." for number in range(model.vision_depth)):
        tensors |= norm(f"{layer}layer_norm1", width) | norm(f"{layer}layer_norm2", width)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            tensors |= linear(f"{layer}self_attn.{name}", width, width)
        tensors |= linear(f"{layer}mlp.fc1", width, model.vision_mlp_dim)
        tensors |= linear(f"{layer}mlp.fc2", model.vision_mlp_dim, width)
    return tensors | norm(f"{VISION}post_layernorm", width)


def _connector(model: GrootN16Config) -> Tensors:
    merged, width = 4 * model.vision_width, model.backbone_embedding_dim
    return (
        norm(f"{CONNECTOR}0", merged) | linear(f"{CONNECTOR}1", merged, width) | linear(f"{CONNECTOR}3", width, width)
    )
