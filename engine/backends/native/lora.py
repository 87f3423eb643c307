"""PEFT's adapters in the reference model, before it has any memory."""

from __future__ import annotations

import torch
from torch import nn

from engine.checkpoint.weight_map import WeightMap
from engine.lora.names import linear_layers
from engine.schema import Lora


def attach(model: nn.Module, weight_map: WeightMap, settings: Lora) -> None:
    """Freeze a model on the meta device and give its linear layers adapters; their values come with the weights."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = linear_layers(weight_map.adaptable, settings.targets)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(layers),
        init_lora_weights=False,
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def published_name(name: str) -> str:
    """The published name of a parameter that PEFT may have moved: the base layer's, or the default adapter's."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")
