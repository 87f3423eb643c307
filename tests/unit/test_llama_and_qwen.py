"""Families that share a model_type, and the first Qwen's own keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.architecture import read_architecture
from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_dotted, load_family
from engine.lora.names import last, linear_layers, not_in_reference
from engine.metrics.flops import matmul_parameters

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("published", "families", "sizes"),
    [
        (LLAMA, ("llama2", "llama3"), ("custom", "3_2_3b")),
        (QWEN2, ("qwen1_5", "qwen2"), ("custom", "custom")),
        (QWEN2 | {"max_position_embeddings": 131072}, ("qwen1_5", "qwen2"), ("custom", "2_5_7b")),
    ],
)
def test_a_directory_loads_in_every_family_of_its_model_type(
    published: dict, families: tuple[str, ...], sizes: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    models = [read_architecture(tmp_path, load_family(name)) for name in families]
    assert tuple(model.name for model in models) == sizes
    first, second = ({k: v for k, v in vars(model).items() if k != "name"} for model in models)
    assert first == second
    assert models[0].rope_scaling == published.get("rope_scaling")


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("qwen", ["model.no_bias=false"], "model.no_bias=false: the output projection and the MLP have no biases here"),
        ("qwen", ["model.kv_channels=32"], "model.kv_channels=32 x model.num_attention_heads=4 must be"),
        ("qwen", ["model.rotary_pct=0.5"], "model.rotary_pct=0.5: positions rotate whole heads here; it must be 1.0"),
        ("qwen", ["model.intermediate_size=1535"], "must be even: it is the width of gate and up together"),
        (
            "qwen",
            ["model.intermediate_size=1534", "parallelism=tp2"],
            "parallelism.tp=2 does not divide model.intermediate_size / 2 = 767; tp can be 1, 13, 59",
        ),
        ("llama3", ["model.hidden_size=258"], "model.hidden_size=258 is not a multiple of model.num_attention_heads=4"),
        ("llama2", ["parallelism=ep2"], "parallelism.ep=2: llama2 tiny has no experts to divide"),
        (
            "qwen2",
            ["model=tiny_moe", "model.mlp_only_layers=[2]"],
            "model.mlp_only_layers holds 2: the layers go from 0 to 1",
        ),
    ],
)
def test_what_cannot_be_is_one_line(family: str, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        prepare(family, ["hardware=cpu", "launcher=print", *overrides])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_input_embeddings_are_no_matrix_product_whatever_they_are_called() -> None:
    card = load_family("qwen")
    config = load_dotted(card.config)(hidden_size=8, num_attention_heads=2, kv_channels=4, intermediate_size=12)
    config.vocab_size, config.num_hidden_layers = 10, 3
    layer = 3 * 8 * 8 + 8 * 8 + 3 * 8 * 6
    assert matmul_parameters(load_dotted(card.weights)(config).published) == 3 * layer + 10 * 8


@pytest.mark.parametrize(
    ("family", "size", "lost"),
    [
        ("qwen", "tiny", {"c_attn", "c_proj", "w1", "w2"}),
        ("qwen2", "tiny", set()),
        ("qwen2", "tiny_moe", {"experts"}),
    ],
)
def test_adapted_layers_that_are_no_modules_of_the_reference(family: str, size: str, lost: set[str]) -> None:
    """All of the first Qwen's, whose reference has other names; of Qwen2 with experts those that are held together."""
    run = prepare(family, ["hardware=cpu", "launcher=print", f"model={size}"])
    weight_map = load_dotted(load_family(family).of(run.model.model_type).weights)(run.model)
    layers = linear_layers(weight_map.published, None)
    found = not_in_reference(weight_map, layers)
    assert {"experts" if ".experts." in layer else last(layer) for layer in found} == lost
    assert len(found) == len([n for n in layers if ".experts." in n or family == "qwen"])
