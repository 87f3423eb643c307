"""Statistics of layers against hooks on the reference, in several layouts; traces; steps that are not wanted."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.data.loader import build_data
from engine.family import load_dotted
from engine.freeze import load_run
from tests import harness
from tests.freezing import freeze
from tests.parity import inspect_steps
from tests.parity.test_training import FIRST, TRAINING
from tests.ranks import Ranks

QUICK = ("native-fsdp2", "megatron-tp2_sp")
LAYOUTS = (
    *QUICK,
    "native-single",
    "native-ddp2",
    "megatron-single",
    "megatron-tp2_pp2",
    "megatron-cp2",
    "megatron-pp2",
)
PARAMETERS = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One long document, so that every row of a step is a part of it and plain causal attention is right."""
    root = tmp_path_factory.mktemp("inspect")
    (root / "corpus").mkdir()
    text = " ".join(f"{k % 7} green bottles on wall {k % 13} and {k * k % 31}." for k in range(2000))
    (root / "corpus" / "song.txt").write_text(text)
    return root


def config_of(root: Path, layout: str, name: str, *extra: str) -> tuple[Path, int]:
    backend, world, overrides = harness.LAYOUTS[layout]
    words = [f"data.path={root / 'corpus'}", f"model.weights={harness.weights_directory(FIRST, root)}"]
    words += [f"backend={backend}", "schedule.steps=3", "schedule.warmup_steps=1", "checkpoint.save_interval=3"]
    kept = [w for w in TRAINING if not w.startswith(("schedule.", "checkpoint.save"))]
    return freeze(root / name, FIRST.family, *kept, *words, *overrides, *extra), world


def expected(config: Path) -> dict[str, torch.Tensor]:
    """What the reference's modules put out in the first step, by their published names."""
    run = load_run(config)
    data = build_data(run, 0, 1, log=lambda _: None)
    batches = data.train.next_step()
    data.close()
    assert all(batch.dense for batch in batches)
    model = load_dotted(FIRST.card.reference).from_pretrained(run.model.weights).float().eval()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if name in ("model.embed_tokens", "model.norm") or (
            parts[:2] == ["model", "layers"] and (len(parts) == 3 or parts[3:] in (["self_attn"], ["mlp"]))
        ):
            module.register_forward_hook(
                lambda _, __, out, name=name: seen.setdefault(name, []).append(
                    out[0] if isinstance(out, tuple) else out
                )
            )
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch.tokens_BS)
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


@pytest.mark.parametrize("layout", PARAMETERS)
def test_layers_and_traces(ranks: Ranks, root: Path, layout: str) -> None:
    looks = ("debug.dump=layers", "debug.steps=[1,3]", "profile=true", "profile.steps=[2]")
    config, world = config_of(root, layout, layout, *looks)
    assert ranks.run(config, world) == [0] * world, (config.parent / "result.json").read_text()
    lines = [json.loads(line) for line in (config.parent / "layers.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 3}
    first = {line["name"]: line for line in lines if line["step"] == 1}
    reference = expected(config)
    assert first.keys() == reference.keys()
    for name, tensor in reference.items():
        line = first[name]
        size = tensor.abs().max().item()
        assert line["nonfinite"] == 0
        assert line["mean"] == pytest.approx(tensor.mean().item(), abs=2e-5 * size), name
        assert line["std"] == pytest.approx(tensor.std(correction=0).item(), rel=2e-4), name
        assert line["absmax"] == pytest.approx(size, rel=2e-4), name
    folder = config.parent / "profile"
    for rank in range(world):
        with gzip.open(folder / f"trace_steps_2-2_rank_{rank}.json.gz", "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert any("mm" in str(name) for name in names)
    assert "calls a step" in (folder / "operations_steps_2-2.txt").read_text()
    assert "Statistics of the layers" in (config.parent / "report.html").read_text()


@pytest.mark.parametrize("layout", [*QUICK, pytest.param("megatron-dp2", marks=pytest.mark.slow)])
def test_a_step_that_is_not_wanted_changes_nothing(ranks: Ranks, root: Path, layout: str) -> None:
    config, world = config_of(root, layout, f"unwanted_{layout}")
    for result in ranks.call(inspect_steps.unwanted, world, config=str(config)):
        assert result["same"] and result["moved"]
        assert (result["updated"], result["updates"]) == ((False, True), (0, 1))
        assert result["asked"] == [result["loss"][0]] and result["loss"][0] == result["loss"][1]
        assert result["norm"][0] == result["norm"][1] > 0


@pytest.mark.parametrize("backend", ["native", "megatron"])
def test_no_supervised_token_has_no_loss(ranks: Ranks, root: Path, backend: str) -> None:
    """0 by the definition of the loss, and so are all gradients."""
    inputs = {"input_ids": torch.arange(10).view(2, 5), "labels": torch.full((2, 5), -100)}
    save_file(inputs, root / "masked.safetensors")
    words = ("job=forward", f"data.inputs={root / 'masked.safetensors'}", "grad=true", f"backend={backend}")
    weights = harness.weights_directory(FIRST, root)
    config = freeze(root / f"masked_{backend}", FIRST.family, *words, f"model.weights={weights}", "parallelism=single")
    assert ranks.run(config, 1) == [0]
    outputs = load_file(config.parent / "outputs.safetensors")
    assert outputs["loss"].item() == 0.0 and math.isfinite(outputs["logits"].sum())
    assert all(not tensor.any() for name, tensor in outputs.items() if name.startswith("grad."))
