"""A family whose routers have a correction bias: Qwen3's layers with transformers' own DeepSeek-V3 router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from zoo.qwen3.config import Qwen3MoeConfig

from engine import schema
from engine.backends.base import TRAINED, TensorSource
from engine.checkpoint.card import Card
from engine.checkpoint.origin import make_card
from engine.checkpoint.sharded import ShardedSource, save_sharded
from engine.checkpoint.sources import open_weights
from engine.checkpoint.weight_map import Rule, WeightMap
from engine.comm import Comm
from engine.data.batch import IGNORE
from engine.family import Family
from engine.llm.grouped import weight_map as qwen3_weight_map
from engine.llm.parts import correction_bias
from engine.moe.mixture import Mixture
from tests.parallel.megatron_ranks import DECAY, LR, TINY, Published, Source, micro_batches

KEYS = TINY | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.0,
}
GROUPS, GROUP_TOPK, SCALE = 4, 2, 1.5
BIAS = "model.layers.{i}.mlp.gate.e_score_correction_bias"
EXPERT_LAYERS = (0, 2, 3)


@dataclass
class BiasedConfig(Qwen3MoeConfig):
    """Qwen3-MoE's keys; its routers are another family's."""

    def mixture(self) -> Mixture:
        router = {"score_function": "sigmoid", "bias": True, "scaling_factor": SCALE}
        return replace(super().mixture(), groups=GROUPS, group_topk=GROUP_TOPK, **router)


def weight_map(config: BiasedConfig) -> WeightMap:
    """Qwen3's, with a bias in every layer that has experts."""
    plain, (rule,) = qwen3_weight_map(config), correction_bias(BIAS, (config.num_experts,)).rules
    biases = {BIAS.replace("{i}", str(i)): (config.num_experts,) for i in EXPERT_LAYERS}
    rules = (*plain.rules, Rule("decoder.layers.{i}." + rule.megatron, rule.rows))
    return replace(plain, published=plain.published | biases, rules=rules, buffers=frozenset(biases))


def reference(config: Any) -> torch.nn.Module:
    """transformers' Qwen3-MoE, its routers replaced by transformers' DeepSeek-V3 ones."""
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    model = transformers.Qwen3MoeForCausalLM(config)
    router = SimpleNamespace(
        num_experts_per_tok=config.num_experts_per_tok,
        num_local_experts=config.num_experts,
        hidden_size=config.hidden_size,
        routed_scaling_factor=SCALE,
        n_group=GROUPS,
        topk_group=GROUP_TOPK,
        norm_topk_prob=True,
    )
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = DeepseekV3TopkRouter(router)
    return model


class Reference:
    """What the native backend asks of a reference class."""

    @staticmethod
    def _from_config(config: Any, dtype: torch.dtype, attn_implementation: str) -> torch.nn.Module:
        config._attn_implementation = attn_implementation
        return reference(config).to(dtype)


FAMILY = Family(
    name="biased",
    shelf="llm",
    model_type="qwen3_moe",
    config="tests.parallel.biased_family:BiasedConfig",
    reference="tests.parallel.biased_family:Reference",
    reference_config="transformers:Qwen3MoeConfig",
    weights="tests.parallel.biased_family:weight_map",
    megatron="engine.backends.megatron.decoder:grouped_query",
    tasks=("pretrain", "lora"),
)


@dataclass
class Plan:
    """A run of the family."""

    backend: str
    layout: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    rate: float = 0.01
    task: str = "pretrain"

    def run(self) -> schema.Run:
        run = schema.Run(family="biased", model=BiasedConfig(name="test", **KEYS), job=schema.TrainJob())
        strategy = "zero1" if self.backend == "megatron" else "ddp"
        run.backend, run.task.name = self.backend, self.task
        run.parallelism = schema.Parallelism(name="test", strategy=strategy)
        for key, value in self.layout.items():
            setattr(run.parallelism, key, value)
        run.precision = schema.Precision(name=self.precision, compile=False)
        run.optim = schema.Optim(name="adamw", lr=LR, weight_decay=DECAY, clip_grad=0.0)
        run.moe.bias_update_rate = self.rate
        run.task.lora.targets = ["q_proj"]
        return run


def build(plan: Plan, mode: str, source: TensorSource, kinds: Sequence[str]) -> Any:
    """A backend on this rank, its weights loaded."""
    from engine.backends import megatron, native
    from hardware import registry

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    module = megatron if plan.backend == "megatron" else native
    backend = module.build(plan.run(), FAMILY, registry.get("cpu"), mode)
    backend.load_state(source, kinds)
    return backend


def train(
    plan: Plan,
    weights: Published | Path,
    steps: Sequence[Sequence[tuple[Tensor, ...]]],
    updates: int = 0,
    save: Path | None = None,
    refused: Sequence[int] = (),
) -> Any:
    """Losses of the steps and this rank's slices afterwards. Steps in `refused` are computed and not taken."""
    source = ShardedSource(weights) if isinstance(weights, Path) else Source(weights)
    backend = build(plan, "train", source, TRAINED)
    backend.set_optimizer_step(updates)
    losses = []
    for number, rows in enumerate(steps):
        batches = micro_batches(rows, backend.dp_rank, backend.dp_size, 1)
        result = backend.train_step(batches, LR, lambda _, taken=number not in refused: taken)
        losses.append(result.loss_sum / result.num_tokens)
    if save is not None:
        buffers = weight_map(plan.run().model).buffers
        save_sharded(save, backend.state(TRAINED), {}, Comm(torch.device("cpu")), Card("biased", buffers=buffers))
    state = list(backend.state(TRAINED))
    backend.close()
    return losses, state


def forward(plan: Plan, weights: Published, rows: Sequence[tuple[Tensor, ...]]) -> Any:
    """The mean loss and the slices of the gradients."""
    backend = build(plan, "forward", Source(weights), ("param",))
    result = backend.forward(micro_batches(rows, backend.dp_rank, backend.dp_size, 1), True)
    gradients = list(backend.state(("grad",)))
    backend.close()
    return result.loss_sum / result.num_tokens, gradients


def convert(plan: Plan, weights: Path, out: Path) -> None:
    """A published directory to a checkpoint, as `job=convert` does it."""
    run = plan.run()
    run.model.weights = str(weights)
    source = open_weights(weights, FAMILY, run.model)
    backend = build(plan, "weights", source, ("param",))
    save_sharded(out, backend.state(("param",)), {}, Comm(torch.device("cpu")), make_card(run, FAMILY))
    backend.close()


class WithAdapters(Source):
    """Weights, and adapters that are fresh."""

    def read(self, kind: str, name: str, shape: Any, offset: Any, extent: Any) -> Tensor:
        if "lora_" in name:
            return torch.full(extent, 0.01)
        return super().read(kind, name, shape, offset, extent)


def adapt(plan: Plan, weights: Published, steps: Sequence[Sequence[tuple[Tensor, ...]]]) -> Any:
    """What a run that trains adapters saves, and the biases that its routers have in the end."""
    backend = build(plan, "train", WithAdapters(weights), TRAINED)
    for rows in steps:
        backend.train_step(micro_batches(rows, backend.dp_rank, backend.dp_size, 1), LR)
    roots = backend._chunks if plan.backend == "megatron" else [backend._strategy.module]
    buffers = [buffer for root in roots for name, buffer in root.named_buffers() if name.endswith("_bias")]
    names = {part.name for part in backend.state(TRAINED)}
    backend.close()
    return names, [buffer.clone() for buffer in buffers]


def several(calls: Sequence[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """These functions in one visit to the ranks."""
    values = [function(**arguments) for function, arguments in calls]
    dist.destroy_process_group()
    return values


def random_reference(seed: int = 9) -> torch.nn.Module:
    """The reference in fp32; biases that decide: as wide as the scores are apart."""
    import transformers

    config = transformers.Qwen3MoeConfig(**KEYS)
    config._attn_implementation = "eager"
    model = reference(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            elif tensor.dim() == 1:
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            else:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def published(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the reference's names as they are published: each expert's matrices apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                found |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{prefix}.{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        elif name != "lm_head.weight":  # tied
            found[name] = tensor
    return found


def published_weights(model: torch.nn.Module) -> Published:
    """The published tensors, with moments of zero for those that have some."""
    params = {n: t.detach().clone().contiguous() for n, t in published(model, model.state_dict()).items()}
    moments = {
        (kind, n): torch.zeros_like(t) for n, t in params.items() for kind in TRAINED[1:] if "correction" not in n
    }
    return {("param", n): t for n, t in params.items()} | moments


def loss_of(model: torch.nn.Module, rows: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """The mean loss over all supervised tokens of rows that are one document each."""
    tokens, labels = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    return cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def plain_steps(model: torch.nn.Module, steps: Sequence[Sequence[tuple[Tensor, ...]]], rate: float) -> list[float]:
    """Losses of AdamW over the reference; after each step an expert's bias moves towards the mean load.

    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2: less by `rate` if the expert is overloaded, more if underloaded.
    """
    loads: dict[Any, Tensor] = {}
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    for router in routers:
        router.register_forward_hook(
            lambda module, _, output: loads.update({module: torch.bincount(output[2].flatten(), minlength=8)})
        )
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for rows in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for router in routers:
            mean = loads[router].sum().item() / 8
            for expert, load in enumerate(loads[router].tolist()):
                router.e_score_correction_bias[expert] += rate * ((load < mean) - (load > mean))
    return losses
