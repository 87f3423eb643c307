"""Adapters of latent attention, whose narrow projections are whole on every rank: ten steps of PEFT's own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from engine.freeze import load_run
from tests import harness
from tests.parity.test_lora import peft_adapter
from tests.parity.test_training import plain_steps, root, train, with_words
from tests.ranks import Ranks

__all__ = ["root"]

CASE = next(with_words(c) for c, _ in harness.discover() if str(c) == "deepseek_v2-groups_and_yarn")
TARGETS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron-single", "megatron-tp2_sp", "megatron-cp2", "native-fsdp2"])
def test_ten_steps_equal_a_loop_over_pefts_model(ranks: Ranks, root: Path, layout: str) -> None:
    adapter = peft_adapter(root, CASE, TARGETS)
    words = ("task=lora", f"task.lora.adapter={adapter}", "optim.lr=0.02", "moe.aux_loss=0")
    run_dir, rows = train(ranks, root, layout, f"latent-{layout}", *words, "checkpoint.export_hf=true", case=CASE)
    base = harness.reference(CASE.card, CASE.published)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    losses, norms = plain_steps(load_run(run_dir / "config.yaml"), model, CASE)
    assert losses[0] - losses[-1] >= 0.2
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    got = load_file(run_dir / "hf" / "adapter_model.safetensors")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert set(got) == {name.replace(".default", "") for name in trained}
    for name, tensor in trained.items():
        assert torch.dist(got[name.replace(".default", "")], tensor) <= 1e-4 * tensor.norm(), name
