"""Faster forms of what a stage's layers and its loss do, put into the model before it is wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from engine.backends.compiled import compile_method
from engine.backends.megatron.experts import MoETransformerLayer
from engine.backends.megatron.model import CausalLM
from engine.backends.sources import source_names
from engine.schema import Run
from hardware.base import Hardware
from hardware.kernels.registry import choose

LOSS = "linear_cross_entropy"


def fuse(run: Run, hardware: Hardware, chunks: Sequence[CausalLM]) -> dict[str, str]:
    """Compile the layers, if the run asks for it, and never hold the logits of a micro-batch; what was chosen.

    Only in bf16: single precision computes by the definition. Ranks that share the vocabulary need the logits, and so
    do ranks that share rows whose losses are told apart.
    """
    if run.precision.compile:
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            compile_layer(layer)
    by_row, layout = bool(source_names(run)), run.parallelism
    if run.precision.name != "bf16" or layout.tp > 1 or (by_row and layout.cp > 1):
        return {}
    choice = choose(LOSS, hardware.kernels(), run.precision.name, run.kernels.strict)
    for chunk in chunks:
        chunk.linear_loss, chunk.loss_by_row = choice.kernel.load(), by_row
    return {LOSS: str(choice)}


def compile_layer(layer: TransformerLayer) -> None:
    """A dense layer in one piece; of a layer with experts, whose sizes differ from step to step, the attention.

    Attention that chooses keys, keeps states, compresses them or has sinks (loops in plain torch) stays as it is.
    """
    attention = layer.self_attention
    if not isinstance(attention, SelfAttention) or attention.core_attention.sinks is not None:
        return
    compile_method(layer, "_forward_attention" if isinstance(layer, MoETransformerLayer) else "forward")
