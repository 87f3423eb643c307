"""Decoders in Megatron parts: what most families are, with their switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import silu

from engine.backends.megatron.config import transformer_config
from engine.backends.megatron.dsa import IndexerObjective, Indexing, sparse_spec
from engine.backends.megatron.experts import mixture_config, mixture_layers
from engine.backends.megatron.grouped_query import Heads
from engine.backends.megatron.mla import Latent, latent_spec
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.mtp import spec_of
from engine.backends.megatron.rope import Rope, Ropes, magnitude
from engine.backends.megatron.spec import RMSNorm, SpecProvider, attention_spec, block_spec, layer_spec, mlp_spec
from engine.llm.grouped import GroupedConfig
from engine.llm.latent import LatentConfig, score_scale
from engine.llm.sparse import SparseConfig
from engine.schema import Run
from hardware.base import Hardware
from hardware.kernels.registry import choose


def grouped_query_decoder(
    config: Any,
    run: Run,
    hardware: Hardware,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool | tuple[int, int] = False,
    heads: Sequence[Heads] | None = None,
    rope: Rope | Ropes | None = None,
    **architecture: Any,
) -> CausalLM:
    """This rank's part of a pre-norm decoder with grouped-query attention, its weights unset.

    `config` has the keys of `engine.llm.config.DecoderConfig`; `config.mixture()` says which layers have experts and
    `config.windows()` which see a window. `heads` says of each layer what else is its own, and `rope` what is rotated
    where that is not all of a head. `architecture` holds TransformerConfig's own names.
    """
    head, windows = config.head_channels, config.windows()
    settings = {"kv_channels": head, "add_qkv_bias": qkv_bias, "qk_layernorm": bool(qk_norm)} | architecture
    rope = rope or Rope(head, config.rope_theta, config.rope_scaling)
    own = heads or [Heads(window=window) for window in windows]

    def attention(provider: SpecProvider) -> list[ModuleSpec]:
        kinds = {kind: attention_spec(provider, qk_norm, output_bias, kind) for kind in own}
        return [kinds[kind] for kind in own]

    return decoder(config, run, hardware, rope, attention, settings, mlp_bias)


def grouped_query(config: GroupedConfig, run: Run, hardware: Hardware) -> CausalLM:
    """`grouped_query_decoder` of a config that knows its own switches."""
    return grouped_query_decoder(config, run, hardware, **vars(config.switches()))


def latent_decoder(
    config: LatentConfig,
    run: Run,
    hardware: Hardware,
    *,
    pairs: bool = True,
    indexing: Sequence[Indexing] | None = None,
) -> CausalLM:
    """This rank's part of a pre-norm decoder with multi-head latent attention, its weights unset.

    `pairs`: rotary pairs are neighbouring channels. `indexing` says how each layer's attention is sparse.
    """
    rope = Rope(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    latent = Latent(
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotary=config.qk_rope_head_dim,
        value=config.v_head_dim,
        scale=score_scale(config),
        magnitude=magnitude(rope.kind, rope.scaling),
        pairs=pairs,
        bias=config.attention_bias,
    )
    settings = {"kv_channels": config.head_channels}

    def attention(provider: SpecProvider) -> ModuleSpec | list[ModuleSpec]:
        if indexing is None:
            return latent_spec(provider, latent)
        kernel = choose("sparse_attention", hardware.kernels(), run.precision.name, run.kernels.strict)
        objective = IndexerObjective(run.indexer.loss, run.indexer.stage == "dense")
        return [sparse_spec(provider, latent, each, kernel, objective) for each in indexing]

    return decoder(config, run, hardware, rope, attention, settings)


def sparse_decoder(config: SparseConfig, run: Run, hardware: Hardware) -> CausalLM:
    """`latent_decoder` whose attention looks at the keys that an indexer chooses, its own or that of a layer before."""
    own = Indexing(config.index_n_heads, config.index_head_dim, config.index_topk, config.index_pairs)
    leaders = enumerate(config.leaders())
    layers = [own if leader == layer else replace(own, layer=leader) for layer, leader in leaders]
    return latent_decoder(config, run, hardware, indexing=layers)


def decoder(
    config: Any,
    run: Run,
    hardware: Hardware,
    rope: Rope | Ropes,
    attention: Callable[[SpecProvider], ModuleSpec | list[ModuleSpec]],
    architecture: dict[str, Any],
    mlp_bias: bool = False,
    norm: type[RMSNorm] = RMSNorm,
) -> CausalLM:
    """This rank's part of a pre-norm decoder; `attention` makes what stands for it, in all layers or in each."""
    mixture = config.mixture()
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
    }
    transformer = transformer_config(
        run, hardware, **settings | (mixture_config(run, hardware, mixture) if mixture else {}) | architecture
    )
    rope.configure(transformer)
    provider = SpecProvider(hardware, norm)
    dense = mlp_spec(provider, bias=mlp_bias)
    own = attention(provider)
    if mixture:
        layers = mixture_layers(run, hardware, provider, mixture, own, dense)
    elif isinstance(own, list):
        layers = [layer_spec(provider, each, dense) for each in own]
    else:
        layers = layer_spec(provider, own, dense)
    block = block_spec(transformer, provider, layers)
    padding = getattr(config, "pad_token_id", None)
    like = layers[config.predictor_layer()] if isinstance(layers, list) else layers
    predictors = spec_of(config, run, like, provider.layer_norm())
    return CausalLM(transformer, block, config.vocab_size, config.tie_word_embeddings, rope, padding, predictors)
