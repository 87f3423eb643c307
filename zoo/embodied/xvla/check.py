"""What no X-VLA can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.xvla.config import XvlaConfig
from zoo.xvla.spaces import SPACES

RATES = ("head_dropout", "dropout", "activation_dropout", "drop_path_rate")
LISTS = ("davit_depths", "davit_heads", "davit_groups", "davit_kernels", "davit_strides", "davit_paddings")
COUNTS = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "davit_window", "num_domains")
COUNTS += ("max_text_positions", "dim_time", "max_len_seq", "num_denoising_steps", "max_image_positions", "max_frames")


def check(model: XvlaConfig, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    for key in COUNTS:
        if getattr(model, key) < 1:
            yield f"model.{key}={getattr(model, key)} must be at least 1"
    for key in RATES:
        if not 0 <= getattr(model, key) < 1:
            yield f"model.{key}={getattr(model, key)} must be at least 0 and less than 1"
    if model.action_mode not in SPACES:
        yield f"model.action_mode={model.action_mode} is not known; {', '.join(SPACES)} are"
        return
    space = SPACES[model.action_mode]
    if space.grippers and model.state_dim <= max(space.grippers):
        yield (
            f"model.max_state_dim={model.state_dim}: model.action_mode={model.action_mode} hides the grippers of the "
            f"state, and needs max_state_dim={space.size} and use_proprio=true"
        )
    if model.hidden_size % model.num_heads:
        yield f"model.hidden_size={model.hidden_size} must be a multiple of model.num_heads={model.num_heads}"
    if model.encoder_attention_heads > 0 and model.d_model % model.encoder_attention_heads:
        yield f"model.d_model={model.d_model} must be a multiple of encoder_attention_heads"
    yield from _davit(model)
    outside = [number for number in model.domain_ids or [] if not 0 <= number < model.num_domains]
    if outside or model.domain_ids == []:
        yield f"model.domain_ids={model.domain_ids}: numbers from 0 to model.num_domains - 1 = {model.num_domains - 1}"


def _davit(model: XvlaConfig) -> Iterator[str]:
    """The stages of the vision tower, and the features that they make of an image."""
    stages = len(model.davit_dims)
    unlike = [key for key in (*LISTS, "davit_prenorm") if len(getattr(model, key)) != stages]
    if unlike or not stages:
        yield f"model.{', '.join(unlike) or 'davit_dims'}: one number for each of the {stages} stages of davit_dims"
        return
    for key in ("davit_heads", "davit_groups"):
        if any(part < 1 or dim % part for dim, part in zip(model.davit_dims, getattr(model, key), strict=True)):
            yield f"model.{key}={getattr(model, key)} must divide davit_dims={model.davit_dims}"
    if any(number < 1 for key in ("davit_depths", "davit_kernels", "davit_strides") for number in getattr(model, key)):
        yield "model.davit_depths, davit_kernels and davit_strides must be 1 or more at every stage"
        return
    side = round(max(0, model.image_tokens - 1) ** 0.5)
    if not 1 <= side <= model.max_image_positions:
        yield f"model.image_size={model.image_size} makes {side} rows of features; 1 to {model.max_image_positions} fit"
    if (words := model.image_tokens + model.tokenizer_max_length) > model.max_text_positions:
        yield f"model.max_text_positions={model.max_text_positions}: an image and an instruction make {words}; raise it"
    if (tokens := model.tokens(1)) > model.max_len_seq:
        yield f"model.max_len_seq={model.max_len_seq}: one camera makes {tokens} tokens already; raise it"
