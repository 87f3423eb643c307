"""AdamW over Megatron's gradient buffers, whole on every data-parallel rank (ddp) or sharded over them (zero1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from engine.schema import Run

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Share:
    """What this rank's optimizer holds of a parameter: its elements [start, end), flattened."""

    start: int
    end: int
    main: Tensor  # fp32
    state: dict[str, Tensor]  # exp_avg and exp_avg_sq, like main, and step


class AdamW:
    """torch's AdamW with weight decay on matrices only, and the gradient norm over all ranks."""

    def __init__(self, run: Run, models: Sequence[DistributedDataParallel], fused: bool = False) -> None:
        """`models` are the virtual stages of this rank, or the only one. `fused`: by torch's one kernel for all."""
        settings, bf16 = run.optim, run.precision.name == "bf16"
        self._clip = settings.clip_grad
        self._models = models
        self.updates = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=models[0].ddp_config.use_distributed_optimizer,
            overlap_param_gather=models[0].ddp_config.overlap_param_gather,
            optimizer_cpu_offload=settings.offload,
            optimizer_offload_fraction=1.0 if settings.offload else 0.0,
        )
        # The offloading optimizer takes leaves only, and a rank's share of an fp32 parameter is a view of it.
        with torch.set_grad_enabled(not settings.offload):
            self._optimizer = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False)
        for group in self._optimizer.param_groups:
            # megatron-core leaves this product to its own scheduler of learning rates.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            if fused and not settings.offload:
                group["fused"], group["foreach"] = True, False
        self.set_updates(0)

    def zero_grad(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, lr: float, update: bool = True) -> float:
        """Clip and update; the gradient norm before clipping. Updates nothing if the norm is not finite. Collective.

        Without `update` only the norm is computed.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm) or not update:
            return norm
        if self._clip > 0:
            # Not megatron-core's own call, in which ranks without a share of the parameters skip a collective.
            clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self._clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step_with_ready_grads()
        self.updates += 1
        return norm

    def share(self, parameter: Tensor) -> Share | None:
        """This rank's share of a model parameter, or None."""
        for optimizer in self._optimizer.chained_optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                if parameter in optimizer.model_param_gbuf_map:
                    within = optimizer._get_model_param_range_map(parameter)["param"]
                    group, index = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][index]
                    return Share(within.start, within.end, main.data, optimizer.optimizer.state[main])
            else:
                sixteen_bit = isinstance(optimizer, Float16OptimizerWithFloat16Params)
                main = getattr(parameter, "main_param", parameter) if sixteen_bit else parameter
                if main in optimizer.optimizer.state:  # experts may have an optimizer of their own
                    return Share(0, parameter.numel(), main, optimizer.optimizer.state[main])
        return None

    def set_updates(self, updates: int) -> None:
        """Continue AdamW's bias correction from here; moments that do not exist yet are zero."""
        self.updates = updates
        for optimizer in self._optimizer.chained_optimizers:
            inner = optimizer.optimizer
            if isinstance(inner, HybridDeviceOptimizer):
                share_states(inner)
            for parameter, fused in ((p, group.get("fused")) for group in inner.param_groups for p in group["params"]):
                state: dict[str, Any] = inner.state[parameter]
                for moment in MOMENTS:
                    if moment not in state:
                        state[moment] = torch.zeros_like(host_copy(inner, parameter).detach())
                # A tensor for each: AdamW counts in place, and one shared by all would count once for every parameter.
                place = parameter.device if fused else None  # torch's fused kernel counts on the device
                state["step"] = torch.tensor(float(updates), device=place)

    @torch.no_grad()
    def main_to_model(self) -> None:
        """Bring the model's parameters to what the main copies say. Collective."""
        for optimizer in self._optimizer.chained_optimizers:
            inner = optimizer.optimizer
            if isinstance(inner, HybridDeviceOptimizer):
                for parameter, copy in inner.gpu_params_map_cpu_copy.items():
                    copy.data.copy_(parameter)
            if hasattr(optimizer, "_copy_main_params_to_model_params"):  # there is no other copy in plain fp32
                optimizer._copy_main_params_to_model_params()
        for model in self._models:
            if model.ddp_config.use_distributed_optimizer:
                model.start_param_sync(force_sync=True)


def share_states(inner: HybridDeviceOptimizer) -> None:
    """Let the offloading optimizer and the ones on the host that do its work see the same states from the start."""
    for worker in inner.sub_optimizers:
        for group in worker.param_groups:
            for copy in group["params"]:
                inner.state[inner.inner_param_to_orig_param[copy]] = worker.state[copy]


def host_copy(inner: Any, parameter: Tensor) -> Tensor:
    """Where a parameter is updated: on the host, if its optimizer is offloaded."""
    return inner.param_to_inner_param[parameter] if isinstance(inner, HybridDeviceOptimizer) else parameter
