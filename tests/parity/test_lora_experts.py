"""Adapters on experts, whose matrices the reference and PEFT hold together: PEFT's files in and out, and training.

Training is checked by the chain rule on the reference's own gradients; what files mean, by PEFT's merged model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.architecture import read_architecture
from engine.backends.base import Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card
from engine.checkpoint.hf import export_hf
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.sharded import save_sharded
from engine.checkpoint.sources import open_weights
from engine.data.loader import build_data
from engine.errors import UserError
from engine.family import load_dotted
from engine.freeze import load_run
from engine.lora.adapter import config_text, place_adapters, read_adapter, settings_of
from engine.lora.fused import fused_of
from engine.lora.names import adapter_shapes, linear_layers
from engine.lora.sources import open_adapter
from engine.schema import Lora
from tests import harness
from tests.freezing import freeze
from tests.parity.test_training import CASES, balancing_loss, block_mask, root, train
from tests.ranks import Ranks

__all__ = ["root"]
# PEFT looks for these keys among the modules' names only, and then heeds them.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")

EXPERTS = [case for case in CASES if case.experts]
NO_DENSE = next(
    c for c, _ in harness.discover() if c.family == harness.SPINE and c.experts and "mlp_only_layers" not in c.published
)
R, ALPHA = 2, 5
SCALE = ALPHA / R
MODULES, MATRICES = ["k_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE = [f"mlp.{name}.weight" for name in MATRICES]  # of the layer without experts
PREFIX = "base_model.model."


def by_peft(root: Path, case: harness.Case, name: str, **words: Any) -> Path:
    """An adapter of random values that bite, saved by PEFT itself for the reference's own directory."""
    folder = root / f"{name}-{case}"
    if not folder.exists():
        base = harness.weights_directory(case, root)
        model = load_dotted(case.card.reference).from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(lora_alpha=ALPHA, task_type="CAUSAL_LM", **words))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in (p for n, p in adapted.named_parameters() if ".lora_" in n):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder)
    return folder


def adapter(root: Path, case: harness.Case) -> Path:
    """On every expert's matrices, the dense layer's and some of the attention's."""
    return by_peft(root, case, "adapter", r=R, target_modules=MODULES, target_parameters=PARAMETERS + DENSE)


def peft_model(case: harness.Case, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(harness.reference(case.card, case.published), folder).eval()


def published(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The reference's tensors by published name: it holds gate and up of all experts in one, down in another."""
    found = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for half, one in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{prefix}.{expert}.{half}.weight"] = one
        elif kind == "down_proj":
            found |= {f"{prefix}.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def pairs(folder: Path, experts: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by published layer of `adapter`: PEFT's pairs [experts r, in], [out, r experts], gate and up by rows."""
    tensors, found = load_file(folder / "adapter_model.safetensors"), {}
    for name in (n.removesuffix(".lora_A.weight") for n in tensors if "lora_A" in n):
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        layer = name.removeprefix(PREFIX)
        if ".experts" not in layer:
            found[layer] = (down, up)
            continue
        module = layer.removesuffix(".base_layer")
        halves = ("gate_proj", "up_proj") if layer != module else ("down_proj",)
        for expert in range(experts):
            rows = up.reshape(up.shape[0], -1, experts)[:, :, expert].chunk(len(halves))
            own = down.reshape(experts, -1, down.shape[1])[expert]
            found |= {f"{module}.{expert}.{half}": (own, part) for half, part in zip(halves, rows, strict=True)}
    return found


def first_step(config: Path, root: Path, case: harness.Case) -> tuple[float, float]:
    """Loss and norm of the adapters' gradients: dA = s Bᵀ dW and dB = s dW Aᵀ for W + s B A."""
    model, heard = peft_model(case, adapter(root, case)).merge_and_unload().requires_grad_(True), []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _module, _inputs, output: heard.append(output[0]))
    batches, total = build_data(load_run(config), 0, 1).train.next_step(), 0.0
    count = sum(batch.num_tokens for batch in batches)
    for batch in batches:
        heard.clear()
        logits = model(
            input_ids=batch.tokens_BS, position_ids=batch.positions_BS, attention_mask=block_mask(batch)
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / count + balancing_loss(model, heard) / len(batches)).backward()
        total += loss.item()
    gradients, square = published({name: p.grad for name, p in model.named_parameters()}), 0.0
    for name, (down, up) in pairs(adapter(root, case), case.published["num_experts"]).items():
        square += (SCALE * up.T @ gradients[f"{name}.weight"]).square().sum().item()
        square += (SCALE * gradients[f"{name}.weight"] @ down.T).square().sum().item()
    return total / count, square**0.5


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("layout", ["megatron-ep2_tp2", pytest.param("megatron-ep2_pp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_adapters_of_experts(ranks: Ranks, root: Path, case: harness.Case, layout: str) -> None:
    """From PEFT's own adapter: gradients, curves of every layout, and the trained one in PEFT and here."""
    words = ("task=lora", f"task.lora.adapter={adapter(root, case)}", "optim.lr=0.02", "checkpoint.export_hf=true")
    run_dir, rows = train(ranks, root, layout, f"lora-{case}-{layout}", *words, case=case)
    loss, norm = first_step(run_dir / "config.yaml", root, case)
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert rows[0]["loss"] - rows[-1]["loss"] >= 0.1
    single = root / f"lora-{case}-single"
    if not single.exists():
        train(ranks, root, "megatron-single", single.name, *words, case=case)
    assert losses(run_dir) == pytest.approx(losses(single), rel=1e-5)
    got, alone = (load_file(folder / "hf" / "adapter_model.safetensors") for folder in (run_dir, single))
    assert got.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.dist(got[name], tensor) <= 1e-3 * tensor.norm(), name

    inputs = harness.unpacked_inputs(case.published["vocab_size"])
    with torch.no_grad():
        expected = peft_model(case, run_dir / "hf")(inputs["input_ids"]).logits
        plain = harness.reference(case.card, case.published)(inputs["input_ids"]).logits
    assert (expected - plain).abs().max() > 0.1
    save_file(inputs, root / "experts-batch.safetensors")
    batch = f"data.inputs={root / 'experts-batch.safetensors'}"
    door = freeze(root / f"door-{case}-{layout}", case.family, "job=forward", f"model.weights={run_dir}", batch)
    assert ranks.run(door, 1) == [0], (door.parent / "result.json").read_text()
    assert (load_file(door.parent / "outputs.safetensors")["logits"] - expected).abs().max() <= 1e-5
    same_pairs(run_dir / "hf", run_dir / "checkpoints" / "step_00000010", case, [*MODULES, *MATRICES])


def same_pairs(folder: Path, checkpoint: Path, case: harness.Case, targets: list[str]) -> None:
    """An export holds the very pairs of its checkpoint, under settings that go on with it."""
    weight_map = load_dotted(case.card.weights)(read_architecture(folder, case.card))
    places, source = place_adapters(read_adapter(folder), weight_map), ShardedSource(checkpoint)
    settings = settings_of(folder, places, weight_map.published)
    assert (settings["r"], settings["alpha"], set(settings["targets"])) == (R, ALPHA, set(targets))
    file = open_adapter(folder, places)
    shapes = adapter_shapes(linear_layers(weight_map.published, targets), R)
    assert shapes == source.index.shapes()
    for name, shape in shapes.items():
        whole = ("param", name, shape, (0, 0), shape)
        assert torch.equal(file.read(*whole), source.read(*whole)), name


@pytest.mark.parametrize("targets", [["up_proj"], ["gate_proj", "k_proj"], ["down_proj", "q_proj"]], ids="-".join)
def test_some_of_the_matrices(root: Path, targets: list[str]) -> None:
    """An export of adapters on a part of what PEFT holds together, against the sum W + s B A."""
    case, generator = EXPERTS[0], torch.Generator().manual_seed(6)
    base = harness.weights_directory(case, root)
    merged = load_file(base / "model.safetensors")
    weight_map = load_dotted(case.card.weights)(read_architecture(base, case.card))
    shapes = adapter_shapes(linear_layers(weight_map.published, targets), R)
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    texts = {"config.json": (base / "config.json").read_text()}
    texts["adapter_config.json"] = config_text(Lora(R, ALPHA, 0.5), targets, str(base), fused_of(weight_map))
    card = Card(case.family, {PREFIX + name: "F32" for name in tensors}, texts=texts)
    place = root / "-".join(targets)
    slices = [Slice("param", name, tuple(t.shape), (0, 0), t) for name, t in tensors.items()]
    save_sharded(place / "checkpoint", slices, {}, Alone(), card)
    export_hf(place / "checkpoint", place / "hf")
    for layer in linear_layers(weight_map.published, targets):
        merged[f"{layer}.weight"] += SCALE * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    by_peft = published(peft_model(case, place / "hf").merge_and_unload().state_dict())
    for name, tensor in merged.items():
        assert torch.allclose(by_peft[name], tensor, atol=1e-6), name
    same_pairs(place / "hf", place / "checkpoint", case, targets)


WAYS: dict[str, dict[str, Any]] = {
    "by_module": {"r": 3, "target_modules": ["q_proj", *MATRICES]},  # PEFT gives gate and up together twice the rank
    "gate_up": {"r": 3, "target_modules": [], "target_parameters": PARAMETERS[:1], "use_rslora": True},
    "down": {"r": 1, "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    "patterns": {
        "r": 2,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": PARAMETERS,
        "rank_pattern": {r"1\.self_attn\.q_proj": 5, "experts.down_proj": 4},
        "alpha_pattern": {r".*\.down_proj": 10, "q_proj": 9},
    },
    "one_by_one": {},  # the form of transformers 4: each expert has its own linear layers, and so its own pairs
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_that_peft_saved(root: Path, way: str) -> None:
    """The merged weights are PEFT's, and what training would go on from is the same change of the weights."""
    case = NO_DENSE
    folder = by_peft(root, case, way, **WAYS[way]) if WAYS[way] else one_by_one(root, case)
    with torch.no_grad():
        merged = published(peft_model(case, folder).merge_and_unload().state_dict())
    base = load_file(harness.weights_directory(case, root) / "model.safetensors")
    model = read_architecture(folder, case.card)
    source, changed = open_weights(folder, case.card, model), 0
    for name, tensor in base.items():
        whole = tuple(tensor.shape)
        got = source.read("param", name, whole, (0,) * len(whole), whole)
        assert torch.allclose(got, merged[name], atol=1e-6), name
        changed += not torch.equal(got, tensor)
    weight_map = load_dotted(case.card.weights)(model)
    places = place_adapters(read_adapter(folder), weight_map)
    assert changed == len(places) > 4
    if way == "patterns":
        with pytest.raises(UserError, match="scales its layers differently"):
            settings_of(folder, places, weight_map.published)
        return
    settings = settings_of(folder, places, weight_map.published)
    r, scale, file = settings["r"], settings["alpha"] / settings["r"], open_adapter(folder, places)
    for layer, (rows, columns) in linear_layers(weight_map.published, settings["targets"]).items():
        down = file.read("param", f"{layer}.lora_A.weight", (r, columns), (0, 1), (r, columns - 1))
        up = file.read("param", f"{layer}.lora_B.weight", (rows, r), (2, 0), (rows - 2, r))
        change = merged[f"{layer}.weight"] - base[f"{layer}.weight"]
        assert torch.allclose(scale * up @ down, change[2:, 1:], atol=1e-5), layer


def test_blocks_that_are_none(root: Path) -> None:
    """A file that was trained on and still says that gate and up are apart is refused, not read in part."""
    folder = by_peft(root, NO_DENSE, "blocks", r=4, target_modules=[], target_parameters=PARAMETERS)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "blocks": ",".join(MATRICES)})
    model = read_architecture(folder, NO_DENSE.card)
    source = open_weights(folder, NO_DENSE.card, model)
    shape = (NO_DENSE.published["moe_intermediate_size"], NO_DENSE.published["hidden_size"])
    with pytest.raises(UserError, match="diagonal blocks, and it has not"):
        source.read("param", "model.layers.1.mlp.experts.2.gate_proj.weight", shape, (0, 0), shape)


def one_by_one(root: Path, case: harness.Case) -> Path:
    folder = root / f"one-by-one-{case}"
    folder.mkdir()
    base = harness.weights_directory(case, root)
    stored = {name: tuple(t.shape) for name, t in load_file(base / "model.safetensors").items()}
    shapes, generator = adapter_shapes(linear_layers(stored, MATRICES), R), torch.Generator().manual_seed(5)
    tensors = {PREFIX + name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": R}
    config |= {"lora_alpha": ALPHA, "target_modules": MATRICES}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
