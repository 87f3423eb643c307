"""Settings of experts that cannot be are refused in one line; arithmetic on loads and capacities."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.headers import by_layer
from engine.cli import prepare
from engine.errors import UserError
from engine.llm.grouped import weight_map
from engine.metrics.flops import active_share, matmul_parameters
from engine.moe.balance import Coefficients, balancing_sum, z_sum
from engine.moe.capacity import capacity, keep
from engine.moe.load import summary
from engine.moe.replay import check


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model=tiny_moe", "parallelism.ep=3", "parallelism.dp=3"], "parallelism.ep=3 does not divide"),
        (["model=tiny_moe", "parallelism=ep2_tp2", "parallelism.etp=2", "parallelism.dp=1"], "must divide the 2 ranks"),
        (
            ["model=tiny_moe", "parallelism=tp2_sp", "parallelism.etp=3", "parallelism.dp=3"],
            "does not divide the width of an expert, 256",
        ),
        (["model=tiny_moe", "parallelism=tp2"], "with experts needs parallelism.sp=true"),
        (["model=tiny_moe", "backend=native", "parallelism.etp=2"], "parallelism.etp=2: with backend=native"),
        (["model=tiny_moe", "backend=native", "moe.dispatcher=allgather"], "only backend=megatron has it"),
        (["model=tiny_moe", "moe.drop=position"], "moe.drop has no effect"),
        (["model=tiny_moe", "moe.dispatcher=flex"], "moe.dispatcher=flex: there is no such choice"),
        (["model=tiny_moe", "moe.bias_update_rate=0.1"], "have no correction bias"),
        (["model=tiny_moe", "moe.capacity_factor=0"], "must be greater than 0"),
        (["model=tiny_moe", "model.num_experts_per_tok=9"], "from 1 to model.num_experts=8"),
        (["model=tiny_moe", "model.mlp_only_layers=[7]"], "the layers go from 0 to 1"),
        (["model=tiny", "parallelism=ep2"], "qwen3 tiny has no experts to divide"),
        (["model=tiny", "moe.z_loss=0.1"], "qwen3 tiny has no experts"),
        (["model=tiny", "model.num_experts=8"], "model.num_experts: there is no such key"),
        (["model=tiny_moe", "model.model_type=qwen3"], "model.model_type=qwen3: it is fixed"),
    ],
)
def test_refusals(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare("qwen3", ["hardware=cpu", "launcher=print", *words])
    assert line in str(caught.value)


@pytest.mark.parametrize(("size", "total"), [("30b_a3b", 30_532_122_624), ("235b_a22b", 235_093_634_560)])
def test_published_sizes_compose(size: str, total: int) -> None:
    """With as many parameters as transformers counts for the published configurations."""
    layout = ["parallelism=ep8", "parallelism.pp=2", "data.global_batch_size=16"]
    run = prepare("qwen3", [f"model={size}", "hardware=cpu", "launcher=print", "precision=bf16", *layout])
    assert (run.parallelism.dp, run.launcher.nproc_per_node) == (8, 16)
    assert sum(torch.Size(shape).numel() for shape in weight_map(run.model).published.values()) == total


def alone(x: torch.Tensor) -> torch.Tensor:
    return x


def test_balancing_sums_add_up_over_groups() -> None:
    """Two groups and two tokens that do not count. On paper: E * tokens * sum of load times mean score."""
    scores = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
    chosen = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0], [1, 0]]).bool()
    group = torch.tensor([0, 0, 1, -1, -1])
    first = 2 * 2 * (0.5 * 0.45 + 0.5 * 0.55)
    second = 2 * 1 * (1.0 * 0.5)
    assert balancing_sum(scores, chosen, group, 2, alone).item() == pytest.approx(first + second)
    assert balancing_sum(scores, chosen, torch.full((5,), -1), 1, alone).item() == 0.0


def test_z_sum_of_known_logits() -> None:
    """The log-sum-exp of n equal logits x is x + log n."""
    logits = torch.full((3, 4), 1.5)
    wanted = (1.5 + torch.log(torch.tensor(4.0))) ** 2
    assert z_sum(logits, torch.tensor([0, -1, 0])).item() == pytest.approx(2 * wanted.item())


def test_capacity_keeps_the_likeliest_or_the_first() -> None:
    assert capacity(10, 2, 8, 1.0) == 3  # 2.5 rounded up
    probs = torch.tensor([[0.1], [0.9], [0.5], [0.5]])
    chosen = torch.tensor([[True], [True], [False], [True]])
    assert keep(probs, chosen, 2, "probs").flatten().tolist() == [False, True, False, True]
    assert keep(probs, chosen, 2, "position").flatten().tolist() == [True, True, False, False]
    assert torch.equal(keep(probs, chosen, 9, "probs"), chosen)


def test_metrics_of_a_step() -> None:
    counts = torch.tensor([[3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    sums = torch.tensor([[8.0, 0.0, 2.0], [4.0, 0.0, 1.0]], dtype=torch.float64)
    row = summary(counts, sums, 4, Coefficients(aux=0.1, z=0.1), whole=True)
    assert row == {
        "moe_imbalance": [1.5, 1.0],
        "moe_aux_loss": [2.0, 1.0],
        "moe_z_loss": [0.5, 0.25],
        "moe_load": [[1500, 500], [1000, 1000]],
    }


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (torch.zeros(2, 3, 3, dtype=torch.int64), "should be [rows, tokens, experts of a token], [2, 3, 2]"),
        (torch.zeros(2, 3, 2), "should be whole numbers"),
        (torch.tensor([0, 8]).expand(2, 3, 2), "must lie in [0, 8)"),
        (torch.tensor([5, 5]).expand(2, 3, 2), "names an expert twice"),
    ],
)
def test_decisions_that_cannot_be(chosen: torch.Tensor, line: str, tmp_path) -> None:
    model = prepare("qwen3", ["model=tiny_moe", "hardware=cpu", "launcher=print"]).model
    with pytest.raises(UserError) as caught:
        check({"experts.0": chosen}, tmp_path / "batch.safetensors", (2, 3), model.mixture())
    assert line in str(caught.value)


def test_arithmetic_counts_the_experts_of_a_token() -> None:
    """30B-A3B: the published number of active parameters, without input embeddings, and without vectors."""
    model = prepare("qwen3", ["model=30b_a3b", "hardware=cpu", "launcher=print"]).model
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    wanted = 3_353_032_704 - 151_936 * 2048 - vectors
    assert matmul_parameters(weight_map(model).published, active_share(model)) == wanted


def test_missing_experts_are_one_line() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (0, 2, 3) for e in range(128)]
    assert by_layer(names) == ["model.layers.{0,2-3}.mlp.experts.{0-127}.up_proj.weight"]
    assert by_layer(names[:128]) == ["model.layers.0.mlp.experts.{0-127}.up_proj.weight"]
