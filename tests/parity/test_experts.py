"""What models with experts have besides: the reference's balancing loss, and router decisions that are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import harness
from tests.ranks import Ranks

CASE = next(case for case in harness.spine_cases() if case.experts)
LAYOUTS = [
    "megatron-ep2_tp2",
    "native-ddp2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("megatron-ep2_pp2", "megatron-ep2", "native-fsdp2")),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_references_balancing_loss(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    """With output_router_logits the reference's loss includes it, over all rows and layers at once; so does ours."""
    model, inputs = harness.reference_of(CASE), harness.unpacked_inputs(CASE.published["vocab_size"])
    plain = harness.expected_unpacked(model, inputs)
    wanted = harness.expected_unpacked(model, inputs | {"output_router_logits": True})
    assert wanted["loss"] - plain["loss"] > 0.05
    got = harness.forward(ranks, CASE, layout, inputs, tmp_path / "run", extra=("model.output_router_logits=true",))
    harness.assert_close(got, wanted)


WAYS = [
    ("megatron-ep2_etp2", ("moe.grouped=true",)),
    ("megatron-ep2_pp2", ("moe.dispatcher=allgather", "parallelism.recompute=full")),
    ("megatron-ep2_tp2", ("moe.grouped=true", "parallelism.recompute=selective")),
    ("native-fsdp2", ("parallelism.recompute=full",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ways"), WAYS)
def test_other_ways_to_the_same_numbers(ranks: Ranks, layout: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Experts in one matrix, the other dispatcher, activations computed again: the reference's loss and gradients."""
    model, inputs = harness.reference_of(CASE), harness.unpacked_inputs(CASE.published["vocab_size"])
    wanted = harness.expected_unpacked(model, inputs | {"output_router_logits": True})
    extra = ("model.output_router_logits=true", *ways)
    got = harness.forward(ranks, CASE, layout, inputs, tmp_path / "run", extra=extra)
    harness.assert_close(got, wanted)


def given_decisions(shape: torch.Size) -> dict[int, Tensor]:
    """For each layer with experts, k different experts of each token, drawn without looking at it."""
    generator = torch.Generator().manual_seed(21)
    experts, topk = CASE.published["num_experts"], CASE.published["num_experts_per_tok"]
    layers = [i for i in range(CASE.published["num_hidden_layers"]) if i not in CASE.published["mlp_only_layers"]]
    return {i: torch.rand(*shape, experts, generator=generator).argsort(-1)[..., :topk] for i in layers}


def expected_with(decisions: dict[int, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference, its routers' choices replaced and the weights of the new ones normalised."""
    model, handles = harness.reference_of(CASE), []

    def replacing(chosen: Tensor):
        def hook(_module: torch.nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple:
            weights = output[0].softmax(-1).gather(1, chosen)
            return output[0], weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for layer, chosen in decisions.items():
        gate = model.model.layers[layer].mlp.gate
        handles.append(gate.register_forward_hook(replacing(chosen.flatten(0, 1))))
    try:
        return harness.expected_unpacked(model, inputs)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_decisions_are_written_and_replayed(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    """Given decisions give the reference's numbers with them, and are what comes out; own ones replay to the same."""
    inputs = harness.unpacked_inputs(CASE.published["vocab_size"])
    decisions = given_decisions(inputs["input_ids"].shape)
    named = {f"experts.{layer}": chosen for layer, chosen in decisions.items()}
    got = harness.forward(ranks, CASE, layout, inputs | named, tmp_path / "given")
    harness.assert_close(got, expected_with(decisions, inputs))
    for name, chosen in named.items():
        assert torch.equal(got[name].sort(-1).values, chosen.sort(-1).values), name
    own = harness.forward(ranks, CASE, layout, inputs, tmp_path / "own")
    written = {name: tensor for name, tensor in own.items() if name.startswith("experts.")}
    assert written.keys() == named.keys()
    again = harness.forward(ranks, CASE, layout, inputs | written, tmp_path / "again")
    harness.assert_close(again, {n: t for n, t in own.items() if n not in written})
    assert load_file(tmp_path / "again" / "run" / "outputs.safetensors").keys() == own.keys()
