"""The correction bias of routers: loaded, used, moved, saved and exported alike on both backends in every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.base import Slice
from engine.checkpoint.hf import export_hf
from engine.checkpoint.sharded import ShardedSource
from engine.llm.parts import correction_bias, decoder_map
from engine.moe.bias import update
from engine.moe.mixture import Mixture
from engine.moe.route import choose, weigh
from tests.parallel import biased_family as biased
from tests.parallel.biased_family import BIAS, EXPERT_LAYERS, Plan
from tests.parallel.megatron_ranks import DENSE, Published, assemble, global_batch, relative
from tests.ranks import Ranks

RATE = 0.01
STEPS = [global_batch(DENSE, seed=seed) for seed in (1, 2, 3, 4)]
NAMES = [BIAS.replace("{i}", str(i)) for i in EXPERT_LAYERS]
# By name: ranks and what runs on them.
LAYOUTS: dict[str, tuple[int, Plan]] = {
    "megatron-single": (1, Plan("megatron")),
    "megatron-ep2_tp2": (2, Plan("megatron", {"ep": 2, "tp": 2, "sp": True, "etp": 1})),
    "megatron-cp2": (2, Plan("megatron", {"cp": 2})),
    "megatron-dp2": (2, Plan("megatron", {"strategy": "ddp"})),
    "native-single": (1, Plan("native")),
    "native-zero1": (2, Plan("native", {"strategy": "zero1"})),
    "native-fsdp2": (2, Plan("native", {"strategy": "fsdp"})),
}


@pytest.fixture(scope="module")
def weights() -> Published:
    return biased.published_weights(biased.random_reference())


def biases(state: Published) -> dict[str, torch.Tensor]:
    return {name: tensor for (_, name), tensor in state.items() if "correction" in name}


def visit(ranks: Ranks, world: int, calls: list[tuple[Any, dict[str, Any]]]) -> list[list[Any]]:
    """For each call what every rank gave."""
    return list(zip(*ranks.call(biased.several, world, calls=calls), strict=True))


def together(answers: list[Any]) -> tuple[Any, Published]:
    """What the first rank computed, and the whole tensors of all ranks."""
    slices: list[Slice] = [part for _, parts in answers for part in parts]
    return answers[0][0], assemble(slices)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, weights: Published, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """(losses, state) of four steps in every layout, the third of them refused; each saves a checkpoint."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for world in (1, 2):
        chosen = {name: plan for name, (size, plan) in LAYOUTS.items() if size == world}
        arguments = {"weights": weights, "steps": STEPS, "refused": (2,)}
        calls = [
            (biased.train, {"plan": p, "save": folder / name / "step_00000001", **arguments})
            for name, p in chosen.items()
        ]
        found |= dict(zip(chosen, map(together, visit(ranks, world, calls)), strict=True))
    return found | {"folder": folder}


def test_the_gradients_are_the_references(ranks: Ranks, weights: Published) -> None:
    """The choice follows the bias, the weights do not, and the bias has no gradient."""
    model = biased.random_reference()
    loss = biased.loss_of(model, STEPS[0])
    loss.backward()
    wanted = biased.published(model, {name: p.grad for name, p in model.named_parameters()})
    layouts = ("megatron-ep2_tp2", "native-fsdp2")
    calls = [(biased.forward, {"plan": LAYOUTS[n][1], "weights": weights, "rows": STEPS[0]}) for n in layouts]
    for answers in visit(ranks, 2, calls):
        got, gradients = together(answers)
        assert got == pytest.approx(loss.item(), abs=1e-5)
        assert {name for _, name in gradients} == set(wanted)
        far = {n: relative(gradients["grad", n], grad) for n, grad in wanted.items()}
        assert max(far.values()) < 1e-4, far


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_a_plain_loop(trained: dict[str, Any], name: str) -> None:
    """A step that is not taken moves nothing; every layout ends with the same bits."""
    model = biased.random_reference()
    wanted = biased.plain_steps(model, [STEPS[0], STEPS[1], STEPS[3]], RATE)
    losses, state = trained[name]
    assert [*losses[:2], losses[3]] == pytest.approx(wanted, rel=1e-5)
    moved = biases(state)
    assert sorted(moved) == sorted(NAMES)
    for bias in NAMES:
        assert moved[bias].dtype == torch.float32
        assert torch.equal(moved[bias], model.state_dict()[bias]), bias
    assert not any("correction" in key for kind, key in state if kind != "param")


def test_a_checkpoint_goes_on_in_another_layout_and_backend(
    ranks: Ranks, trained: dict[str, Any], weights: Published
) -> None:
    """Bit for bit for the bias: the same four steps, the last two of them after a move."""
    moves = [("megatron-ep2_tp2", "native-fsdp2"), ("native-zero1", "megatron-cp2")]
    more = [global_batch(DENSE, seed=5)]
    calls = []
    for before, after in moves:
        source = trained["folder"] / before / "step_00000001"
        for name in (before, after):
            calls.append((biased.train, {"plan": LAYOUTS[name][1], "weights": source, "steps": more, "updates": 3}))
    answers = [together(one) for one in visit(ranks, 2, calls)]
    for (losses, state), (others, other_state) in zip(answers[::2], answers[1::2], strict=True):
        assert losses == pytest.approx(others, rel=1e-5)
        assert all(torch.equal(state["param", name], other_state["param", name]) for name in NAMES)


def test_low_precision_frozen_weights_and_a_rate_of_zero_leave_every_bit(ranks: Ranks, weights: Published) -> None:
    plans = [
        *(Plan(b, precision="bf16", rate=0.0) for b in ("megatron", "native")),
        Plan("native", {"strategy": "fsdp"}, precision="bf16", rate=0.0),
    ]
    calls = [(biased.train, {"plan": plan, "weights": weights, "steps": STEPS[:1]}) for plan in plans]
    answers = [*visit(ranks, 1, calls[:2]), *visit(ranks, 2, calls[2:])]
    for answer in answers:
        _, state = together(answer)
        assert all(torch.equal(state["param", name], weights["param", name]) for name in NAMES)


def test_exports_give_the_published_bytes_and_keep_fp32(trained: dict[str, Any]) -> None:
    """What a checkpoint holds is exported in the stored dtype, and an export in bf16 leaves the bias alone."""
    folder = trained["folder"] / "megatron-ep2_tp2" / "step_00000001"
    _, state = trained["megatron-ep2_tp2"]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    out = export_hf(folder, folder.parent / "hf", "BF16")
    tensors = load_file(out / "model.safetensors")
    assert all(torch.equal(tensors[name], state["param", name]) for name in NAMES)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    assert ShardedSource(folder).index.buffers == frozenset(NAMES)


def test_published_bytes_come_back_through_a_model_in_bf16(ranks: Ranks, weights: Published, tmp_path: Path) -> None:
    """A directory in bf16 whose biases are fp32, as published ones are: to shards of two layouts and back."""
    original = tmp_path / "published"
    original.mkdir()
    tensors = {n: t if n in NAMES else t.bfloat16() for (kind, n), t in weights.items() if kind == "param"}
    save_file(tensors, original / "model.safetensors")
    (original / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "dtype": "bfloat16"}))
    plans = {n: dataclasses.replace(LAYOUTS[n][1], precision="bf16") for n in ("megatron-ep2_tp2", "native-fsdp2")}
    outs = {name: tmp_path / name / "step_00000001" for name in plans}
    visit(ranks, 2, [(biased.convert, {"plan": p, "weights": original, "out": outs[n]}) for n, p in plans.items()])
    for out in outs.values():
        back = load_file(export_hf(out, out.parent / "hf") / "model.safetensors")
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype, name
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_adapters_leave_the_bias_alone(ranks: Ranks, weights: Published) -> None:
    """It belongs to the frozen model: it does not move, and what is saved does not hold it."""
    calls = [
        (biased.adapt, {"plan": Plan(backend, task="lora"), "weights": weights, "steps": STEPS[:2]})
        for backend in ("megatron", "native")
    ]
    for ((names, found),) in visit(ranks, 1, calls):
        assert names and all("lora_" in name for name in names)
        assert len(found) == len(NAMES)
        for buffer, name in zip(found, NAMES, strict=True):
            assert torch.equal(buffer, weights["param", name])


def test_a_step_of_the_bias() -> None:
    """Eq. in section 2.1.2 of DeepSeek-V3: 3 of 8 assignments are above the mean of 2, 1 is below, 2 is the mean."""
    bias = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    update(bias, torch.tensor([3, 1, 2, 2]), 0.25)
    assert bias.tolist() == [[0.25, -0.75, 2.0, 0.0]]
    thirds = torch.zeros(3)
    update(thirds, torch.tensor([7, 7, 6]), 0.5)  # the mean, 20/3, has no exact fraction
    assert thirds.tolist() == [-0.5, -0.5, 0.5]


def test_softmax_with_a_bias_weighs_without_it() -> None:
    """ERNIE's router: transformers' own."""
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    config = ernie.Ernie4_5_MoeConfig(hidden_size=16, moe_num_experts=8, moe_k=3)
    router = ernie.Ernie4_5_MoeTopKRouter(config)
    torch.manual_seed(2)
    router.weight.data.normal_()
    router.moe_statics.e_score_correction_bias.data.normal_()
    logits, wanted, chosen = router(torch.randn(11, 16))
    mixture = Mixture(experts=8, topk=3, ffn_hidden_size=1, layers=(True,), bias=True)
    ours = choose(logits, router.moe_statics.e_score_correction_bias[0], mixture)
    assert torch.equal(ours, chosen)
    assert torch.allclose(weigh(logits, ours, mixture), wanted, atol=1e-7)
    assert not torch.equal(choose(logits, None, mixture), chosen)


def test_a_published_shape_of_one_row() -> None:
    """ERNIE publishes [1, experts] under a name that is not the reference's."""
    part = correction_bias("mlp.moe_statics.bias", (1, 4), reference="mlp.gate.moe_statics.bias")
    tensors = decoder_map([[part]], vocab_size=5, hidden=2, tied=True)
    name = "model.layers.0.mlp.moe_statics.bias"
    assert tensors.buffers == {name}
    assert name in tensors.published and name not in tensors.parameters
    assert tensors.megatron_shape("decoder.layers.0.mlp.router.expert_bias") == (1, 4)
    assert tensors.is_buffer("model.layers.0.mlp.gate.moe_statics.bias")
    assert not tensors.is_buffer("model.norm.weight") and not tensors.is_buffer("model.rotary_emb.inv_freq")
