"""Parts of the native backend that need no second rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from engine.backends.native import attention, build
from engine.backends.native.model import fill_buffers, meta_model, reference_config
from engine.backends.native.shards import owners, rows_of
from engine.errors import UserError
from engine.family import load_family
from engine.schema import Precision
from hardware import registry
from hardware.kernels.attention import ReferenceAttention
from tests.parallel.native_steps import model_config, run_of

QWEN3 = load_family("qwen3")
attention.register(ReferenceAttention())
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("changes", [{}, {"rope_theta": 1e6}, {"rope_scaling": YARN}, {"head_dim": 6}])
def test_buffers_of_a_model_made_without_memory_are_the_references(changes: dict[str, Any]) -> None:
    config = model_config(**changes)
    model = meta_model(QWEN3, config)
    fill_buffers(model, torch.device("cpu"))
    published = {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling, "head_dim": config.head_dim}
    reference = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config.from_dict(
            {
                "model_type": "qwen3",
                "vocab_size": 131,
                "hidden_size": 64,
                "intermediate_size": 72,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "max_position_embeddings": 64,
            }
            | published
        )
    )
    expected = dict(reference.named_buffers())
    assert expected
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(buffers[name], buffer), name
    assert model.model.rotary_emb.attention_scaling == reference.model.rotary_emb.attention_scaling


def test_every_published_key_reaches_the_reference() -> None:
    changes = {"rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True, "eos_token_id": 3, "rope_theta": 7.0}
    theirs = reference_config(QWEN3, model_config(**changes))
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": changes.pop("rope_theta")}
    assert changes == {key: getattr(theirs, key) for key in changes}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of("ddp", tp=2), "parallelism.tp=2: backend=native has data parallelism only"),
        (run_of("fdsp"), "parallelism.strategy=fdsp is not known; ddp, zero1, fsdp or hsdp"),
        (replace(run_of("ddp"), precision=Precision("fp32", compile=True)), "precision.compile=true: hardware=cpu"),
        (run_of("ddp", model=model_config(attention_dropout=0.1)), "model.attention_dropout=0.1"),
    ],
)
def test_what_it_does_not_do_it_says(run: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(run, QWEN3, registry.get("cpu"), "train")
    assert "\n" not in str(caught.value)


def test_a_window_that_no_layer_uses_is_allowed() -> None:
    config = model_config(use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert "sliding_attention" not in meta_model(QWEN3, config).config.layer_types


@pytest.mark.parametrize("mode", ["forward", "weights"])
def test_without_an_optimizer_there_are_parameters_only(mode: str) -> None:
    backend = build(run_of("ddp"), QWEN3, registry.get("cpu"), mode)
    assert [s.kind for s in backend.state(("param",))] == ["param"] * 24
    assert backend.optimizer_step() == 0
    with pytest.raises(ValueError, match="no 'exp_avg'"):
        list(backend.state(("exp_avg",)))
    # 131 x 64 embedding; a layer: 2 norms of 64, 2 of 24, q and o 96 x 64, k and v 24 x 64, 3 matrices 72 x 64.
    assert backend.parameters_total == 131 * 64 + 2 * (2 * 64 + 2 * 24 + 2 * 96 * 64 + 2 * 24 * 64 + 3 * 72 * 64) + 64


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 131])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    chunks = [c.tolist() for c in torch.arange(rows).chunk(ranks)] if rows else []
    chunks += [[]] * (ranks - len(chunks))
    for rank in range(ranks):
        assert list(range(rows_of(rank, ranks, rows), rows_of(rank + 1, ranks, rows))) == chunks[rank]


def test_owners_share_the_elements_evenly() -> None:
    assert owners([], 3) == []
    assert owners([5], 4) == [0]
    assert owners([1, 10, 4, 6, 1], 2) == [0, 0, 1, 1, 1]
    sizes = [7] * 12 + [50, 1, 1]
    loads = [sum(s for s, o in zip(sizes, owners(sizes, 3), strict=True) if o == r) for r in range(3)]
    assert max(loads) <= 50 + 7
