"""X-VLA's training in the layouts of the native backend against lerobot's own model and optimizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.freeze import load_run
from tests.freezing import freeze
from tests.parallel.test_policies import LAYOUTS, assert_same_curve, curve, dataset, tensors
from tests.ranks import Ranks

STEPS, LR, CLIP = 20, 4e-3, 0.6
MODEL = {
    **{"vocab_size": 300, "d_model": 24, "encoder_layers": 1, "encoder_attention_heads": 3, "encoder_ffn_dim": 20},
    **{"davit_dims": "[6,8,10,12]", "davit_heads": "[1,2,2,3]", "davit_groups": "[2,2,1,3]", "davit_window": 3},
    **{"hidden_size": 30, "num_heads": 3, "depth": 2, "num_domains": 5, "len_soft_prompts": 3, "image_size": 33},
    **{"tokenizer_max_length": 9, "chunk_size": 5, "max_action_dim": 7, "max_state_dim": 6, "max_len_seq": 40},
    **{"domain_ids": "[3]", "num_denoising_steps": 2},
}
TRIED = ("single", "ddp2", "zero1", "fsdp2")


def overrides(folder: Path, layout: str) -> list[str]:
    return [
        *(f"model.{key}={value}" for key, value in MODEL.items()),
        *(f"data.path={dataset(folder)}", f"data.cache_dir={folder}/cache", "data.global_batch_size=12"),
        *("data.held_out=0.2", "data.workers=1", "data.prefetch=1", "checkpoint.export_hf=false"),
        *(f"schedule.steps={STEPS}", "schedule.warmup_steps=2", f"optim.lr={LR}", f"optim.clip_grad={CLIP}"),
        *("job.eval_interval=20", "job.eval_rows=5", *LAYOUTS[layout][1]),
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xvla") / "out"


@cache
def by_hand(place: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same steps with lerobot's model, its loss of each sample's own steps, its optimizer and torch's clipping."""
    from lerobot.optim.optimizers import XVLAAdamWConfig
    from zoo.xvla.data import build

    from engine.checkpoint.sources import InitSource, normal
    from engine.schedule import learning_rate
    from tests.parity import lerobot_xvla as lerobot

    settings = load_run(freeze(place / "xvla" / "by_hand", "xvla", *overrides(place, "single")))
    config, optim = settings.model, settings.optim
    theirs = lerobot.policy(config, ("observation.images.top", "observation.images.wrist"), 3, 2)
    first = InitSource(settings.seed, 0.0, normal(config.initializer_range, config.fresh_value))
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, tensor in named.items():
            shape = tuple(tensor.shape)
            tensor.copy_(first.read("param", name, shape, (0,) * len(shape), shape))
    # Florence-2 at a tenth of the rate is its own; the soft prompts' tenth is the recipe's. It takes whatever is called
    # vlm for Florence-2, the head's projection of its features too, which is called otherwise here.
    called = {name.replace("vlm_proj", "text_proj"): parameter for name, parameter in named.items()}
    given = {"betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0, "soft_prompt_lr_scale": 0.1}
    optimizer = XVLAAdamWConfig(lr=LR, **given).build(called)
    scales = [group["lr"] / LR for group in optimizer.param_groups]
    assert sorted(scales) == pytest.approx([0.1, 0.1, 1.0])
    data = build(settings, 0, 1, log=lambda line: None)
    results = []
    for step in range(STEPS):
        total = torch.zeros(())
        for batch in data.train.next_step():
            rows = batch.time - torch.arange(len(batch.time)) / len(batch.time)  # what its stratified times begin with
            _, prediction = lerobot.learned(theirs, batch, rows)
            for row, kept in enumerate(~batch.action_pad):
                given, wanted = prediction[row : row + 1, kept], batch.actions[row : row + 1, kept]
                total = total + sum(theirs.model.action_space(given, wanted).values())
        optimizer.zero_grad()
        (total / settings.data.global_batch_size).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            group["lr"] = learning_rate(step, LR, settings.schedule) * scale
        optimizer.step()
        results.append((total.item() / settings.data.global_batch_size, norm.item()))
    data.close()
    found = {name: tensor.detach() for name, tensor in named.items()}
    return results, found | {n: b for n, b in theirs.named_buffers() if n.endswith("pos_idx_to_embed")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", TRIED)
def test_twenty_steps_equal_lerobots_model_and_optimizer(ranks: Ranks, place: Path, layout: str) -> None:
    wanted, weights = by_hand(place)
    assert wanted[-1][0] < wanted[0][0] * 0.8, "the loss moves"
    assert max(norm for _, norm in wanted) > CLIP, "gradients are clipped"
    config = freeze(place / "xvla" / layout, "xvla", *overrides(place, layout))
    assert ranks.run(config, LAYOUTS[layout][0]) == [0] * LAYOUTS[layout][0]
    assert_same_curve(curve(config.parent), wanted)
    found = tensors(config.parent, "param")
    assert set(found) == set(weights)
    for name, tensor in found.items():
        if not name.endswith(("k_proj.bias", "qkv.bias")):  # keys' have no gradient but rounding, which Adam follows
            assert (tensor - weights[name]).norm() <= 1e-3 * weights[name].norm() + 1e-5, name
