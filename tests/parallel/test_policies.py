"""A policy's training in every layout of the native backend against lerobot's own model and torch's own optimizer."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint.paths import newest
from engine.checkpoint.reader import ShardedSource
from engine.freeze import load_run
from tests.freezing import freeze
from tests.ranks import Ranks
from tests.unit.robot_sets import make

STEPS, EMA, CLIP = 20, 0.8, 0.9
MODEL = {
    **{"depth": 2, "num_heads": 8, "head_dim": 8, "width": 32, "mlp_dim": 48, "expert_width": 24, "expert_mlp_dim": 40},
    **{"vocab_size": 300, "vision_width": 18, "vision_mlp_dim": 30, "vision_depth": 1, "vision_heads": 3},
    **{"patch_size": 7, "image_size": 21, "chunk_size": 5, "max_action_dim": 7, "tokenizer_max_length": 48},
}
# name -> (ranks, overrides); 12 samples a step, one or two in a forward pass: accumulation everywhere
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("parallelism=single", "data.micro_batch_size=2")),
    "ddp2": (2, ("parallelism=ddp2", "data.micro_batch_size=2")),
    "zero1": (2, ("parallelism=zero1", "parallelism.dp=2", "data.micro_batch_size=3")),
    "fsdp2": (2, ("parallelism=fsdp2", "data.micro_batch_size=1", "parallelism.recompute=full")),
    "zero1_4": (4, ("parallelism=zero1", "parallelism.dp=4", "data.micro_batch_size=1")),
    "fsdp4": (4, ("parallelism=fsdp", "parallelism.dp=4", "data.micro_batch_size=1")),
    "hsdp": (4, ("parallelism=hsdp", "parallelism.dp=4", "parallelism.shard_size=2", "data.micro_batch_size=1")),
}
QUICK = ("single", "fsdp2")
slow = pytest.mark.slow


@cache
def dataset(folder: Path) -> Path:
    """Two cameras, episodes shorter than a chunk and longer ones."""
    return make(folder / "set", lengths=(3, 9, 1, 14, 6)).folder


def overrides(folder: Path, layout: str, *more: str) -> list[str]:
    return [
        *(f"model.{key}={value}" for key, value in MODEL.items()),
        *(f"data.path={dataset(folder)}", f"data.cache_dir={folder}/cache", "data.global_batch_size=12"),
        *("data.held_out=0.2", "data.workers=1", "data.prefetch=1"),
        *(f"schedule.steps={STEPS}", "schedule.warmup_steps=2", "optim.lr=4e-3", f"optim.clip_grad={CLIP}"),
        "optim.groups=[{path: '*vision_tower*', lr_scale: 0.25, weight_decay: 0.5}, {path: '*mlp_in*', frozen: true}]",
        *(f"optim.ema_decay={EMA}", "optim.weight_decay=0.05", "job.eval_interval=20", "job.eval_rows=5"),
        *("checkpoint.export_hf=false", *LAYOUTS[layout][1], *more),
    ]


def run(ranks: Ranks, folder: Path, name: str, layout: str, *more: str) -> Path:
    """Train as a user would; the run folder."""
    config = freeze(folder / "pi05" / name, "pi05", *overrides(folder, layout, *more))
    assert ranks.run(config, LAYOUTS[layout][0]) == [0] * LAYOUTS[layout][0]
    return config.parent


def curve(folder: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def judged(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in reversed(rows) if "val_loss" in row)


def tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    source = ShardedSource(newest(folder))
    return {n: source.read(k, n, s, (0,) * len(s), s) for k, n, s in source.tensors() if k == kind}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies") / "out"


@cache
def by_hand(place: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """The same steps with lerobot's model, torch's AdamW and clipping, and the average by its formula."""
    from zoo.pi05.data import build

    from engine.checkpoint.sources import InitSource, normal
    from engine.schedule import learning_rate
    from tests.parity import lerobot_pi05 as lerobot
    from tests.parity.test_policies import as_lerobot

    settings = load_run(freeze(place / "pi05" / "by_hand", "pi05", *overrides(place, "single")))
    config = settings.model
    theirs = lerobot.policy(config, ("observation.images.top", "observation.images.wrist"), 3, 2)
    first = InitSource(settings.seed, 0.0, normal(config.initializer_range, config.fresh_value))
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, tensor in named.items():
            shape = tuple(tensor.shape)
            tensor.copy_(first.read("param", name, shape, (0,) * len(shape), shape))
    seen = {name for name in named if "vision_tower" in name}
    for name in named:
        named[name].requires_grad_("mlp_in" not in name)
    groups = [
        {"params": [p for n, p in named.items() if p.dim() > 1 and n not in seen], "weight_decay": 0.05, "scale": 1.0},
        {"params": [p for n, p in named.items() if p.dim() == 1 and n not in seen], "weight_decay": 0.0, "scale": 1.0},
        {"params": [p for n, p in named.items() if p.dim() > 1 and n in seen], "weight_decay": 0.5, "scale": 0.25},
        {"params": [p for n, p in named.items() if p.dim() == 1 and n in seen], "weight_decay": 0.0, "scale": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.optim.betas, eps=settings.optim.eps)
    average = {name: tensor.detach().clone() for name, tensor in named.items()}
    data = build(settings, 0, 1, log=lambda line: None)
    results = []
    for step in range(STEPS):
        total = torch.zeros(())
        for batch in data.train.next_step():
            padded = torch.nn.functional.pad(batch.actions, (0, config.max_action_dim - batch.actions.shape[-1]))
            errors = theirs.model.forward(*as_lerobot(theirs, batch), padded, batch.noise, batch.time)
            kept = ~batch.action_pad
            errors = errors[..., : batch.actions.shape[-1]].mean(-1) * kept
            total = total + (errors.sum(1) / kept.sum(1)).sum()
        optimizer.zero_grad()
        (total / settings.data.global_batch_size).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings.optim.lr, settings.schedule) * group["scale"]
        optimizer.step()
        for name, tensor in named.items():
            average[name] = EMA * average[name] + (1 - EMA) * tensor.detach()
        results.append((total.item() / settings.data.global_batch_size, norm.item()))
    data.close()
    return results, {name: tensor.detach() for name, tensor in named.items()}, average


def assert_same_curve(got: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    assert len(got) == len(wanted)
    for (loss, norm), (their_loss, their_norm) in zip(got, wanted, strict=True):
        assert math.isclose(loss, their_loss, rel_tol=1e-5)
        assert math.isclose(norm, their_norm, rel_tol=1e-4)


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=slow) for n in LAYOUTS])
def test_twenty_steps_equal_lerobots_model_trained_by_hand(ranks: Ranks, place: Path, layout: str) -> None:
    wanted, weights, average = by_hand(place)
    assert wanted[-1][0] < wanted[0][0] - 0.5, "the loss moves"
    assert max(norm for _, norm in wanted) > CLIP, "gradients are clipped"
    folder = run(ranks, place, layout, layout)
    assert_same_curve(curve(folder), wanted)
    from zoo.pi05.weights import weight_map

    still = weight_map(load_run(folder / "config.yaml").model)
    still = still.unlearned | still.kept  # lerobot lets those that have no gradient decay
    for kind, expected in (("param", weights), ("ema", average)):
        for name, tensor in tensors(folder, kind).items():
            if name not in still:
                # Biases of keys have no gradient but rounding: softmax does not see them.
                assert (tensor - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, (kind, name)


@slow
def test_validation_is_the_same_in_every_layout(ranks: Ranks, place: Path) -> None:
    """The flow loss at fixed noise and times, and the actions' errors after the sampler."""
    first, other = (judged(run(ranks, place, f"judged_{n}", n)) for n in ("single", "fsdp4"))
    keys = ["val_loss", "action_error", "action_error.a", "action_error.b"]
    for key in keys:
        assert math.isclose(first[key], other[key], rel_tol=1e-3), key
    assert first["val_rows"] == other["val_rows"] > 0


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("single", "single"), *(pytest.param(*pair, marks=slow) for pair in (("zero1", "fsdp4"), ("fsdp2", "single")))],
)
def test_resumed_it_goes_on_exactly(ranks: Ranks, place: Path, saved: str, resumed: str) -> None:
    name = f"half_{saved}_{resumed}"
    half = run(ranks, place, name, saved, "checkpoint.save_interval=8", "checkpoint.keep_every=8")
    straight, at = curve(half), half / "checkpoints" / "step_00000008"
    on = run(ranks, place, f"{name}_on", resumed, f"checkpoint.resume={at}")
    if saved == resumed:
        assert curve(on) == straight[8:]
        for kind in ("param", "exp_avg_sq", "ema"):
            expected = tensors(half, kind)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(on, kind).items())
    else:
        assert_same_curve(curve(on), straight[8:])
