"""Adapters: ten steps of PEFT's own model in every layout, PEFT's files in and out, and merging."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from engine.freeze import load_run
from tests import harness
from tests.freezing import freeze
from tests.parity.test_training import CASES, plain_steps, root, steps_of, train
from tests.ranks import Ranks

__all__ = ["root"]

DENSE = next(case for case in CASES if not case.experts)
LAYOUTS = [name for name in harness.LAYOUTS if harness.possible(DENSE, name)]
QUICK = ("megatron-tp2_sp", "megatron-tp2_pp2", "native-fsdp2")
SOME = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]  # parts of what Megatron holds in one matrix


def peft_adapter(root: Path, case: harness.Case, targets: list[str] = SOME) -> Path:
    """An adapter of random values that bite, saved by PEFT itself for the reference's own directory."""
    folder = root / f"adapter-{case}"
    if not folder.exists():
        base = harness.weights_directory(case, root)
        model = _reference_class(case).from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM"))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder)
        adapter = json.loads((folder / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str(base)
    return folder


def _reference_class(case: harness.Case) -> type:
    from engine.family import load_dotted

    return load_dotted(case.card.reference)


def adapted_reference(case: harness.Case, folder: Path, trainable: bool = False) -> PeftModel:
    """PEFT's model of the reference with an adapter's directory."""
    base = harness.reference(case.card, case.published)
    return PeftModel.from_pretrained(base, folder, is_trainable=trainable).eval()


@lru_cache(maxsize=2)
def peft_loop(config: Path, root: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and trained adapters of a bare loop over PEFT's model."""
    model = adapted_reference(DENSE, peft_adapter(root, DENSE), trainable=True)
    losses, norms = plain_steps(load_run(config), model, DENSE)
    return losses, norms, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def lora(ranks: Ranks, root: Path, layout: str, name: str, *extra: str) -> tuple[Path, list[dict]]:
    """A training run that goes on from PEFT's adapter."""
    adapter = f"task.lora.adapter={peft_adapter(root, DENSE)}"
    return train(ranks, root, layout, name, "task=lora", adapter, "optim.lr=0.02", *extra, case=DENSE)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS])
def test_ten_steps_equal_a_loop_over_pefts_model(ranks: Ranks, root: Path, layout: str) -> None:
    run_dir, rows = lora(ranks, root, layout, f"lora-{layout}", "checkpoint.export_hf=true")
    first = root / "lora-first"
    if not first.exists():
        first.symlink_to(run_dir)
    losses, norms, trained = peft_loop(first / "config.yaml", root)
    assert losses[0] - losses[-1] >= 0.2
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    got = load_file(run_dir / "hf" / "adapter_model.safetensors")
    assert set(got) == {name.replace(".default", "") for name in trained}
    for name, tensor in trained.items():
        assert torch.dist(got[name.replace(".default", "")], tensor) <= 1e-4 * tensor.norm(), name


def test_trained_here_loaded_by_peft_merged_and_resumed(ranks: Ranks, root: Path) -> None:
    """In one run: PEFT's logits of the exported adapter, ours of it, those of the merged weights; and a resume."""
    run_dir, whole = lora(ranks, root, "megatron-tp2_sp", "lora-here", "checkpoint.export_hf=true")
    inputs = harness.unpacked_inputs(DENSE.published["vocab_size"])
    with torch.no_grad():
        expected = adapted_reference(DENSE, run_dir / "hf")(inputs["input_ids"]).logits
        plain = harness.reference_of(DENSE)(inputs["input_ids"]).logits
    assert (expected - plain).abs().max() > 0.1
    config = freeze(root / "merge", DENSE.family, "job=convert", "job.merge=true", f"job.source={run_dir}")
    assert ranks.run(config, 1) == [0]
    merged = _reference_class(DENSE).from_pretrained(config.parent / "hf").eval()
    with torch.no_grad():
        assert (merged(inputs["input_ids"]).logits - expected).abs().max() <= 1e-5
    by_peft = adapted_reference(DENSE, run_dir / "hf").merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, by_peft[name], atol=1e-6), name
    save_file(inputs, root / "lora-batch.safetensors")
    batch = f"data.inputs={root / 'lora-batch.safetensors'}"
    for index, weights in enumerate((run_dir, run_dir / "checkpoints" / "step_00000010", config.parent / "hf")):
        door = freeze(root / f"lora-door{index}", DENSE.family, "job=forward", f"model.weights={weights}", batch)
        assert ranks.run(door, 1) == [0], (door.parent / "result.json").read_text()
        assert (load_file(door.parent / "outputs.safetensors")["logits"] - expected).abs().max() <= 1e-5
    folder = run_dir / "checkpoints" / "step_00000005"
    _, rest = lora(ranks, root, "native-fsdp2", "lora-rest", f"checkpoint.resume={folder}")
    assert [row["loss"] for row in rest] == pytest.approx([row["loss"] for row in whole[5:]], rel=1e-5)
    assert steps_of(run_dir) == whole
