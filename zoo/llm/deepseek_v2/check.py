"""Published keys that no DeepSeek-V2 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import latent
from zoo.deepseek_v2.config import DeepseekV2Config


def check(model: DeepseekV2Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from latent.check(model, backend, methods=("greedy", "group_limited_greedy"), scoring="softmax")
    if model.topk_method == "group_limited_greedy" and None in (model.n_group, model.topk_group):
        yield "model.topk_method=group_limited_greedy needs model.n_group and model.topk_group"
    if model.norm_topk_prob:
        yield "model.norm_topk_prob=true: the reference does not normalise the experts' weights; it must be false"
    if model.mlp_bias:
        yield "model.mlp_bias=true: MLPs and experts have no biases here; it must be false"
    if model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size={model.hidden_size} must be a multiple of model.num_attention_heads="
            f"{model.num_attention_heads}: the reference asks for it"
        )
