"""MiMo-V2-Flash's own config.json, which has other names than the reference class, and defaults that follow."""

from __future__ import annotations

import pytest
from zoo.mimo.config import MiMoV2FlashConfig

from engine.checkpoint.config import to_published
from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_family

# The published file (XiaomiMiMo/MiMo-V2-Flash), cut to six layers and without keys that change nothing here.
PUBLISHED = {
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "layernorm_epsilon": 1e-5,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


def test_published_names_say_what_the_references_do() -> None:
    """The reference's own defaults are those of the published model."""
    keys = MiMoV2FlashConfig.respell(PUBLISHED)
    default = MiMoV2FlashConfig(num_hidden_layers=6)
    for key in ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"):
        assert keys[key] == getattr(default, key), key
    assert "rope_theta" not in keys


@pytest.mark.parametrize(
    ("key", "value"),
    [("swa_num_key_value_heads", 4), ("swa_head_dim", 128), ("add_full_attention_sink_bias", True)],
)
def test_what_the_reference_cannot_be_is_said(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        MiMoV2FlashConfig.respell(PUBLISHED | {key: value})


def test_what_follows_from_other_keys_follows_from_what_the_user_says() -> None:
    """Not from the defaults of those keys: the class has 48 layers, and `tiny` another width than its heads' share."""
    run = prepare(
        "mimo",
        [
            *("hardware=cpu", "launcher=print", "model=tiny_flash", "model.num_hidden_layers=7"),
            *("model.layer_types=null", "model.mlp_layer_types=null", "model.rope_theta=70000"),
        ],
    )
    model = run.model
    assert [kind.split("_")[0] for kind in model.layer_types] == ["full", *["sliding"] * 4, "full", "sliding"]
    assert model.mlp_layer_types == ["dense", *["sparse"] * 6]
    assert model.rope_parameters["full_attention"]["rope_theta"] == 70000


def test_ranks_that_do_not_fit_the_key_heads_of_layers_with_a_window() -> None:
    heads = ("model.num_attention_heads=6", "model.num_key_value_heads=1")  # two with a window
    with pytest.raises(UserError, match=r"parallelism\.tp=3: some layers have 2 key/value heads"):
        prepare("mimo", ["hardware=cpu", "launcher=print", "model=tiny_flash", *heads, "parallelism.tp=3"])


def test_what_is_written_is_what_the_reference_reads() -> None:
    """It takes a `rope_scaling` of null, which it does not have, for `rope_parameters`."""
    card = load_family("mimo").of("mimo_v2_flash")
    published = to_published(card, MiMoV2FlashConfig(num_hidden_layers=2))
    assert not {"rope_theta", "rope_scaling"} & published.keys()
    assert published["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
