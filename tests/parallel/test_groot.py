"""GR00T's training in every layout of the native backend: the curve of a single process, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.weight_map import WeightMap
from engine.family import load_dotted, load_family
from engine.freeze import load_run
from tests.freezing import freeze
from tests.parallel.test_policies import EMA, LAYOUTS, STEPS, assert_same_curve, curve, dataset, tensors
from tests.ranks import Ranks

CLIP = 0.4
HEAD: dict[str, Any] = {
    **{"select_layer": 2, "backbone_embedding_dim": 24, "max_state_dim": 5, "max_action_dim": 4, "action_horizon": 6},
    **{"hidden_size": 10, "input_embedding_dim": 18, "max_seq_len": 9, "dit_layers": 5, "dit_heads": 3},
    **{"dit_head_dim": 6, "dit_dropout": 0.0, "state_dropout_prob": 0.3, "max_num_embodiments": 3},
    **{"embodiments": "[1]", "tune_top_llm_layers": 1, "vocab_size": 300, "text_mlp_dim": 20, "text_heads": 2},
    **{"text_kv_heads": 1, "text_head_dim": 12, "vision_width": 16, "vision_mlp_dim": 14, "vision_depth": 2},
    **{"vision_heads": 2, "image_token_id": 5},
}
# In both, one part of the backbone learns and the others stand still.
MODELS: dict[str, dict[str, Any]] = {
    "groot_n17": HEAD
    | {"vlsa_layers": 1, "vlsa_heads": 3, "vlsa_head_dim": 8, "vlsa_dropout": 0.0, "tune_llm": False}
    | {"tune_visual": False, "mrope_section": "[2,2,2]", "patch_size": 4, "num_position_embeddings": 9}
    | {"deepstack_visual_indexes": "[1]", "image_target_size": "[16,8]", "image_crop_size": "[15,15]"},
    "groot_n16": HEAD
    | {"tune_llm": False, "tune_visual": True, "patch_size": 4, "image_size": 16, "shortest_image_edge": 17},
}


def run(ranks: Ranks, place: Path, family: str, layout: str) -> Path:
    count, overrides = LAYOUTS[layout]
    given = [
        *(f"model.{key}={value}" for key, value in MODELS[family].items()),
        *(f"data.path={dataset(place)}", f"data.cache_dir={place}/cache", "data.global_batch_size=12"),
        *("data.workers=1", "data.prefetch=1", "data.held_out=0.2", "job.eval_rows=5"),
        *(f"schedule.steps={STEPS}", "schedule.warmup_steps=2", "optim.lr=4e-3", f"optim.clip_grad={CLIP}"),
        *(f"optim.ema_decay={EMA}", "checkpoint.export_hf=false", *overrides),
    ]
    config = freeze(place / family / layout, family, *given)
    assert ranks.run(config, count) == [0] * count, (config.parent / "result.json").read_text()
    return config.parent


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_twenty_steps_are_those_of_a_single_process(ranks: Ranks, tmp_path: Path, family: str) -> None:
    single = run(ranks, tmp_path, family, "single")
    wanted, card = curve(single), load_family(family)
    assert wanted[-1][0] < wanted[0][0] - 0.3, "the loss moves"
    assert max(norm for _, norm in wanted) > CLIP, "gradients are clipped"
    weight_map: WeightMap = load_dotted(card.weights)(load_run(single / "config.yaml").model)
    weights, average = tensors(single, "param"), tensors(single, "ema")
    for layout in ("ddp2", "zero1", "fsdp2"):
        other = run(ranks, tmp_path, family, layout)
        assert_same_curve(curve(other), wanted)
        for kind, expected in (("param", weights), ("ema", average)):
            for name, tensor in tensors(other, kind).items():
                # Biases of keys have no gradient but rounding: softmax does not see them.
                if name not in weight_map.unlearned | weight_map.kept and not name.endswith(
                    ("to_k.bias", "k_proj.bias")
                ):
                    assert (tensor - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, (kind, name)
