"""X-VLA's tensors under the names that lerobot publishes, and those of the original remote code. Free of torch.

Source of the second: lerobot 0.6.1 `_remap_vendored_florence_state_dict`, read backwards.
"""

from __future__ import annotations

import re

from engine.checkpoint.weight_map import Shape, WeightMap
from zoo.xvla.config import XvlaConfig

PREFIX = "model."  # of lerobot's names, against the original's
VLM = "model.vlm."
TOWER, PROJECTOR = f"{VLM}vision_tower.", f"{VLM}multi_modal_projector."
LANGUAGE, HEAD = f"{VLM}language_model.", "model.transformer."
EMBEDDING, EMBEDDED = f"{LANGUAGE}shared.weight", f"{LANGUAGE}encoder.embed_tokens.weight"
TIMES = f"{PROJECTOR}visual_temporal_embed.pos_idx_to_embed"
PROJECTION, THEIR_PROJECTION = f"{PROJECTOR}image_projection.weight", f"{VLM}image_projection"
# Within `model.`: names as transformers has them, and as Florence-2's remote code.
ORIGINAL = (
    (r"(vision_tower\.convs\.\d+)\.conv\.", r"\1.proj."),
    (r"(_block\.conv[12])\.", r"\1.fn.dw."),
    (r"(spatial_block)\.norm1\.", r"\1.window_attn.norm."),
    (r"(channel_block)\.norm1\.", r"\1.channel_attn.norm."),
    (r"(window_attn|channel_attn)\.(qkv|proj)\.", r"\1.fn.\2."),
    (r"(_block)\.norm2\.", r"\1.ffn.norm."),
    (r"(_block\.ffn)\.(fc\d)\.", r"\1.fn.net.\2."),
    (r"multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"multi_modal_projector\.(image_proj_norm|visual_temporal_embed)\.", r"\1."),
    (r"vlm\.language_model\.", "vlm.language_model.model."),
)


def weight_map(model: XvlaConfig) -> WeightMap:
    """What a published checkpoint stores. The table of times is no parameter; the word embedding has two names."""
    width = model.d_model
    published = {
        **_tower(model),
        PROJECTION: (width, model.davit_dims[-1]),
        **_norm(f"{PROJECTOR}image_proj_norm", width),
        f"{PROJECTOR}image_position_embed.row_embeddings.weight": (
            model.max_image_positions,
            model.davit_dims[-1] // 2,
        ),
        f"{PROJECTOR}image_position_embed.column_embeddings.weight": (
            model.max_image_positions,
            model.davit_dims[-1] - model.davit_dims[-1] // 2,
        ),
        TIMES: (model.max_frames, model.davit_dims[-1]),
        EMBEDDING: (model.vocab_size, width),
        f"{LANGUAGE}encoder.embed_positions.weight": (model.max_text_positions + 2, width),
        **_language(model),
        **_norm(f"{LANGUAGE}encoder.layernorm_embedding", width),
        **_head(model),
    }
    aliases = _aliases([*published, EMBEDDED])
    aliases |= {name: EMBEDDING for name, target in aliases.items() if target == EMBEDDED} | {EMBEDDED: EMBEDDING}
    return WeightMap(
        published=published,
        rules=(),
        num_layers=model.depth,
        aliases=aliases,
        buffers=frozenset({TIMES}),
        transposed=frozenset(name for name, target in aliases.items() if target == PROJECTION),
    )


def original(name: str) -> str:
    """The remote code's name of a tensor, under lerobot's prefix."""
    if name == PROJECTION:
        return THEIR_PROJECTION
    for native, theirs in ORIGINAL:
        name, changed = re.subn(native, theirs, name, count=1)
        if changed:
            break
    return name


def _aliases(published: list[str]) -> dict[str, str]:
    """The original's names, with and without lerobot's prefix, and lerobot's without it."""
    found: dict[str, str] = {}
    for name in published:
        names = {name, original(name)}
        if name != PROJECTION:
            names.add(name.removeprefix(PREFIX))
        names.add(original(name).removeprefix(PREFIX))
        found |= dict.fromkeys(names - {name}, name)
    return found


def _tower(model: XvlaConfig) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {}
    before = 3
    for stage, width in enumerate(model.davit_dims):
        conv, kernel = f"{TOWER}convs.{stage}", model.davit_kernels[stage]
        tensors |= {f"{conv}.conv.weight": (width, before, kernel, kernel), f"{conv}.conv.bias": (width,)}
        tensors |= _norm(f"{conv}.norm", before if model.davit_prenorm[stage] else width)
        for number in range(model.davit_depths[stage]):
            for kind, attention in (("spatial", "window"), ("channel", "channel")):
                tensors |= _block(f"{TOWER}blocks.{stage}.{number}.{kind}_block.", f"{attention}_attn", width)
        before = width
    return tensors


def _block(block: str, attention: str, width: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {}
    for part in ("1", "2"):
        tensors |= {f"{block}conv{part}.weight": (width, 1, 3, 3), f"{block}conv{part}.bias": (width,)}
        tensors |= _norm(f"{block}norm{part}", width)
    tensors |= _linear(f"{block}{attention}.qkv", width, 3 * width) | _linear(f"{block}{attention}.proj", width, width)
    return tensors | _linear(f"{block}ffn.fc1", width, 4 * width) | _linear(f"{block}ffn.fc2", 4 * width, width)


def _language(model: XvlaConfig) -> dict[str, Shape]:
    width, tensors = model.d_model, {}
    for layer in (f"{LANGUAGE}encoder.layers.{i}." for i in range(model.encoder_layers)):
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            tensors |= _linear(f"{layer}self_attn.{name}", width, width)
        tensors |= _norm(f"{layer}self_attn_layer_norm", width)
        tensors |= _linear(f"{layer}fc1", width, model.encoder_ffn_dim)
        tensors |= _linear(f"{layer}fc2", model.encoder_ffn_dim, width) | _norm(f"{layer}final_layer_norm", width)
    return tensors


def _head(model: XvlaConfig) -> dict[str, Shape]:
    width, inner = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    tensors: dict[str, Shape] = {f"{HEAD}pos_emb": (1, model.max_len_seq, width)}
    for block in (f"{HEAD}blocks.{i}." for i in range(model.depth)):
        tensors |= _norm(f"{block}norm1", width) | _norm(f"{block}norm2", width)
        tensors |= _linear(f"{block}attn.qkv", width, 3 * width) | _linear(f"{block}attn.proj", width, width)
        tensors |= _linear(f"{block}mlp.fc1", width, inner) | _linear(f"{block}mlp.fc2", inner, width)
    project = _by_domain if model.use_hetero_proj else _linear
    for name in ("vlm_proj", "aux_visual_proj"):
        tensors |= project(f"{HEAD}{name}", model.d_model, width, *([model.num_domains] * model.use_hetero_proj))
    told = model.action_dim + model.dim_time + model.state_dim
    tensors |= _norm(f"{HEAD}norm", width) | _by_domain(f"{HEAD}action_encoder", told, width, model.num_domains)
    tensors |= _by_domain(f"{HEAD}action_decoder", width, model.action_dim, model.num_domains)
    if model.len_soft_prompts > 0:
        tensors[f"{HEAD}soft_prompt_hub.weight"] = (model.num_domains, model.len_soft_prompts * width)
    return tensors


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inner: int, outer: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outer, inner), f"{name}.bias": (outer,)}


def _by_domain(name: str, inner: int, outer: int, domains: int) -> dict[str, Shape]:
    return {f"{name}.fc.weight": (domains, outer * inner), f"{name}.bias.weight": (domains, outer)}
