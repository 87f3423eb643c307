"""One layer of experts on ranks, and the blocks of transformers that it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import schema
from engine.moe.balance import Coefficients

HIDDEN, WIDTH, SHARED_WIDTH, TOKENS = 16, 10, 14, 24


@dataclass
class Plan:
    """A layer and where it runs."""

    mixture: dict[str, Any]  # of `engine.moe.mixture.Mixture`
    layout: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)

    def run(self) -> schema.Run:
        model = SimpleNamespace(mixture=lambda: SimpleNamespace(aux_loss=0.0, **self.mixture))
        run = schema.Run(family="qwen3", model=model, job=schema.TrainJob())
        run.precision.name = "fp32"
        run.parallelism = dataclasses.replace(schema.Parallelism(name="test", strategy="zero1"), **self.layout)
        run.moe = schema.MoE(**self.moe)
        return run


def weights(mixture: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Random weights under the names that transformers' blocks have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    experts = mixture["experts"]
    tensors = {
        "gate.weight": draw(experts, HIDDEN),
        "experts.gate_up_proj": draw(experts, 2 * WIDTH, HIDDEN),
        "experts.down_proj": draw(experts, HIDDEN, WIDTH),
    }
    if mixture.get("bias"):
        tensors["gate.e_score_correction_bias"] = draw(experts)
    if mixture.get("shared_ffn_hidden_size"):
        name = "shared_expert" if mixture.get("shared_gate") else "shared_experts"
        tensors |= {f"{name}.{part}_proj.weight": draw(SHARED_WIDTH, HIDDEN) for part in ("gate", "up")}
        tensors[f"{name}.down_proj.weight"] = draw(HIDDEN, SHARED_WIDTH)
    if mixture.get("shared_gate"):
        tensors["shared_expert_gate.weight"] = draw(1, HIDDEN)
    return tensors


def inputs(seed: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens [T, H], and the weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(TOKENS, HIDDEN, generator=generator)


def run_layer(plan: Plan, losses: Coefficients | None = None) -> dict[str, Any]:
    """Output, gradients and counts of this rank: {"rows": slice, "output", "input_grad", "grads", "counts"}."""
    from hardware import registry

    hardware = registry.get("cpu")
    hardware.megatron().apply()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    from engine.backends.megatron import groups

    run = plan.run()
    groups.start(run)
    try:
        return _run_layer(plan, run, hardware, losses or Coefficients())
    finally:
        groups.stop()


def _run_layer(plan: Plan, run: schema.Run, hardware: Any, losses: Coefficients) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.nn.functional import silu

    from engine.backends.megatron.attention import Documents
    from engine.backends.megatron.config import transformer_config
    from engine.backends.megatron.experts import mixture_config, mixture_spec
    from engine.backends.megatron.router import Objective
    from engine.backends.megatron.spec import SpecProvider
    from engine.moe.mixture import Mixture

    mixture = Mixture(ffn_hidden_size=WIDTH, layers=(True,), **plan.mixture)
    config = transformer_config(
        run,
        hardware,
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=2,
        gated_linear_unit=True,
        activation_func=silu,
        **mixture_config(run, hardware, mixture),
    )
    objective = Objective(losses, 1, scale=1.0)
    spec = mixture_spec(run, hardware, SpecProvider(hardware), mixture, objective)
    layer = spec(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    fill(layer, weights(plan.mixture))
    layer.train()
    layer.router.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    own = TOKENS // (world // tp)  # of one micro-batch
    layer.router.documents = Documents(1, own, None, own, True, rows_t=torch.zeros(own, dtype=torch.int64))
    x, coefficients = (t[rows] for t in inputs())
    x = x.clone().unsqueeze(1).requires_grad_()
    output, _ = layer(x)
    (output[:, 0] * coefficients).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    counts = layer.router.counts_E
    return {
        "rows": (rows.start, rows.stop),
        "output": output.detach()[:, 0],
        "input_grad": x.grad[:, 0],
        "grads": {n: g for n, g in grads.items() if g is not None},
        "first_expert": parallel_state.get_expert_model_parallel_rank() * (mixture.experts // run.parallelism.ep),
        "etp": (parallel_state.get_expert_tensor_parallel_rank(), run.parallelism.etp),
        "tp": (parallel_state.get_tensor_model_parallel_rank(), tp),
        "counts": counts,
        "sums": layer.router.sums_3,
    }


@torch.no_grad()
def fill(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Give the layer this rank's share of the weights."""
    from megatron.core import parallel_state

    layer.router.weight.copy_(tensors["gate.weight"])
    if "gate.e_score_correction_bias" in tensors:
        layer.router.expert_bias.copy_(tensors["gate.e_score_correction_bias"])
    etp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    up, down = [], []
    for expert in layer.local_expert_indices:
        up.append(gate_up_share(tensors["experts.gate_up_proj"][expert], *etp))
        down.append(tensors["experts.down_proj"][expert].chunk(etp[1], 1)[etp[0]])
    if hasattr(layer.experts, "weight1"):
        layer.experts.weight1.copy_(torch.cat(up))
        layer.experts.weight2.copy_(torch.cat(down))
    else:
        for one, first, second in zip(layer.experts.local_experts, up, down, strict=True):
            one.linear_fc1.weight.copy_(first)
            one.linear_fc2.weight.copy_(second)
    if layer.shared_experts is not None:
        tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        gate, up_, out = (
            next(t for n, t in tensors.items() if f"{p}_proj.weight" in n) for p in ("gate", "up", "down")
        )
        layer.shared_experts.linear_fc1.weight.copy_(gate_up_share(torch.cat([gate, up_]), *tp))
        layer.shared_experts.linear_fc2.weight.copy_(out.chunk(tp[1], 1)[tp[0]])
        if layer.shared_experts.gate_weight is not None:
            layer.shared_experts.gate_weight.copy_(tensors["shared_expert_gate.weight"])


def gate_up_share(whole: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of gate, then of up."""
    gate, up = whole.chunk(2)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def several(calls: Sequence[dict[str, Any]]) -> list[Any]:
    """`run_layer` for each of these in one visit to the ranks."""
    results = [run_layer(**call) for call in calls]
    dist.destroy_process_group()
    return results


def block(mixture: dict[str, Any]) -> torch.nn.Module:
    """transformers' block with the same experts."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    sizes = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts_per_tok": mixture["topk"],
        "hidden_act": "silu",
        "norm_topk_prob": mixture.get("normalised", True),
    }
    if mixture.get("score_function") == "sigmoid":
        config = deepseek.DeepseekV3Config(
            **sizes,
            n_routed_experts=mixture["experts"],
            n_group=mixture["groups"],
            topk_group=mixture["group_topk"],
            routed_scaling_factor=mixture["scaling_factor"],
            n_shared_experts=1,
        )
        module = deepseek.DeepseekV3MoE(config)
        if mixture.get("shared_ffn_hidden_size"):
            module.shared_experts = deepseek.DeepseekV3MLP(config, intermediate_size=SHARED_WIDTH)
        else:
            module.shared_experts = _Nothing()
    elif mixture.get("shared_gate"):
        config = qwen2.Qwen2MoeConfig(
            **sizes, num_experts=mixture["experts"], shared_expert_intermediate_size=SHARED_WIDTH
        )
        module = qwen2.Qwen2MoeSparseMoeBlock(config)
    else:
        module = qwen3.Qwen3MoeSparseMoeBlock(qwen3.Qwen3MoeConfig(**sizes, num_experts=mixture["experts"]))
    module.load_state_dict(weights(mixture), strict=True)
    return module


class _Nothing(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)
