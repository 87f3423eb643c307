"""What no GR00T can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.policy.groot.config import HeadConfig


def check_head(model: HeadConfig) -> Iterator[str]:
    """What N1.6 and N1.7 ask for alike."""
    width = model.dit_heads * model.dit_head_dim
    if width != model.input_embedding_dim or width % 2:
        yield (
            f"model.input_embedding_dim={model.input_embedding_dim} must be even, and dit_heads x dit_head_dim, "
            f"which is {width}"
        )
    seen = model.vlsa_heads * model.vlsa_head_dim
    if model.vlsa_layers and seen != model.backbone_embedding_dim:
        yield (
            f"model.backbone_embedding_dim={model.backbone_embedding_dim} must be vlsa_heads x vlsa_head_dim = {seen}"
        )
    most = model.max_num_embodiments
    if not model.embodiments or any(not 0 <= number < most for number in model.embodiments):
        yield f"model.embodiments={model.embodiments} must be numbers in [0, {most}) (max_num_embodiments)"
    if not 0 <= model.tune_top_llm_layers <= model.select_layer:
        yield (
            f"model.tune_top_llm_layers={model.tune_top_llm_layers} must lie in [0, model.select_layer="
            f"{model.select_layer}]"
        )
    if not 1 <= model.action_horizon <= model.max_seq_len:
        yield f"model.action_horizon={model.action_horizon} must lie in [1, {model.max_seq_len}] (max_seq_len)"
    if not 0 <= model.state_dropout_prob < 1:
        yield f"model.state_dropout_prob={model.state_dropout_prob} must lie in [0, 1)"
    if model.num_inference_timesteps < 1:
        yield f"model.num_inference_timesteps={model.num_inference_timesteps} must be at least 1"
