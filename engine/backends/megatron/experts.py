"""Mixtures of experts in megatron-core's parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from engine.backends.megatron.grouped import GroupedExperts
from engine.backends.megatron.router import Objective, Router
from engine.backends.megatron.spec import SpecProvider, layer_spec
from engine.errors import UserError
from engine.moe.balance import step_losses
from engine.moe.mixture import Mixture
from engine.schema import Run
from hardware.base import Hardware
from hardware.kernels.grouped import one_by_one


def mixture_config(run: Run, hardware: Hardware, mixture: Mixture) -> dict[str, Any]:
    """What TransformerConfig needs to know, under its own names. How to choose, and losses, are the router's own."""
    layout, moe = run.parallelism, run.moe
    return {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.topk,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        "moe_layer_freq": [int(has) for has in mixture.layers],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "moe_token_drop_policy": moe.drop,
        "moe_grouped_gemm": grouped(run, hardware),
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_hidden_size,
        "moe_shared_expert_gate": mixture.shared_gate,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def grouped(run: Run, hardware: Hardware) -> bool:
    """Whether one matrix product serves all experts of a rank. Adapters need experts that are linear layers."""
    if run.task.name == "lora":
        return False
    return hardware.grouped_matmul() is not None if run.moe.grouped is None else run.moe.grouped


def mixture_layers(
    run: Run,
    hardware: Hardware,
    provider: SpecProvider,
    mixture: Mixture,
    attention: ModuleSpec | Sequence[ModuleSpec],
    mlp: Any,
) -> list[ModuleSpec]:
    """A specification for each layer of the model: with experts, or with the dense `mlp`.

    `attention` is that of all layers or of each.
    """
    objective = Objective(step_losses(run), sum(mixture.layers))
    experts = mixture_spec(run, hardware, provider, mixture, objective)

    def layer(has: bool, own: ModuleSpec) -> ModuleSpec:
        spec = layer_spec(provider, own, experts if has else mlp)
        if has:
            spec.module = MoETransformerLayer
        return spec

    each = [attention] * len(mixture.layers) if isinstance(attention, ModuleSpec) else attention
    return [layer(has, own) for has, own in zip(mixture.layers, each, strict=True)]


def mixture_spec(run: Run, hardware: Hardware, provider: SpecProvider, mixture: Mixture, objective: Objective) -> Any:
    """The layer of experts that stands in an MLP's place."""
    spec = get_moe_module_spec_for_backend(provider, mixture.experts)
    if not isinstance(spec, partial):
        raise UserError(
            f"backend=megatron trains experts with megatron-core 0.19, and this is {version('megatron-core')}; "
            "there, dense models would run"
        )
    parts: MoESubmodules = spec.keywords["submodules"]
    if grouped(run, hardware):
        parts.experts = partial(GroupedExperts, matmul=hardware.grouped_matmul() or one_by_one)
    parts.router = partial(Router, mixture=mixture, objective=objective)
    return partial(MoELayer, submodules=parts)


class MoETransformerLayer(TransformerLayer):
    """Tells its router, whenever it runs, which tokens it is about to see: again when activations are recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.documents = kwargs.get("packed_seq_params")
        return super().forward(*args, **kwargs)


def routers(chunks: Sequence[Any]) -> list[Router]:
    """The routers of a rank's stages."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
