"""TransformerConfig: what the run decides. What the architecture decides comes from the family."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from engine.schema import Run
from hardware.base import Hardware

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(run: Run, hardware: Hardware, num_layers: int, **architecture: Any) -> TransformerConfig:
    """The configuration of a run's transformer.

    `architecture` holds TransformerConfig's own names. Weights are left unset: they are always loaded. Dropout is off,
    since none of the supported models train with it.
    """
    layout = run.parallelism
    dtype = DTYPES[run.precision.name]
    fused = hardware.supports("compile")
    recompute = {"none": {}, "selective": SELECTIVE, "full": FULL}[layout.recompute]
    return TransformerConfig(
        num_layers=num_layers,
        **DEFAULTS | architecture,
        **recompute,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=stages(num_layers, layout.pp) if layout.vpp == 1 else None,
        **INTERLEAVED | {"virtual_pipeline_model_parallel_size": layout.vpp} if layout.vpp > 1 else {},
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
    )


DEFAULTS = {
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,  # gradients are divided by the tokens of the global batch, not by micro-batches
    "deallocate_pipeline_outputs": True,
    "gradient_accumulation_fusion": False,  # needs Apex
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,  # the attention is ours
    "perform_initialization": False,
    "persist_layer_norm": False,  # needs Apex
    "transformer_impl": "local",  # must agree with the layer specification
}
# Without these, megatron-core's interleaved schedule computes wrong numbers and says nothing.
INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
# Attention keeps no S x S scores to drop here, so the MLP's wide activations are what selective recomputation is for.
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def stages(num_layers: int, pp: int) -> list[list[str]] | None:
    """The layers of each pipeline stage where they do not divide evenly: the first stages take one more.

    The last stages also hold the head, which is the heavier end of the pipeline. None if the layers divide evenly.
    """
    if num_layers % pp == 0:
        return None
    each, more = divmod(num_layers, pp)
    layout = [["decoder"] * (each + (stage < more)) for stage in range(pp)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout
