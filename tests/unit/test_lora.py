"""What the controller makes of adapters, and the numbers of one merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.architecture import read_architecture
from engine.checkpoint.sources import open_weights
from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_dotted, load_family
from engine.lora.names import adapter_shapes, linear_layers
from engine.lora.start import fresh_adapters
from engine.schema import Run
from tests.unit.data_corpora import byte_tokenizer

FAMILY = load_family("qwen3")
KEYS = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def published(**changes: Any) -> dict[str, tuple[int, ...]]:
    keys = {key: value for key, value in (KEYS | changes).items() if key != "model_type"}
    return load_dotted(FAMILY.weights)(load_dotted(FAMILY.config)(**keys)).published


def base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Random weights with a tokenizer."""
    byte_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator) for n, s in published(**changes).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(KEYS | changes))
    return folder


def adapter(
    folder: Path, of: Path, targets: tuple[str, ...] = ("q_proj", "down_proj"), r: int = 2, **config: Any
) -> Path:
    """An adapter as PEFT writes it, by hand."""
    folder.mkdir()
    shapes = adapter_shapes(linear_layers(published(), targets), r)
    generator = torch.Generator().manual_seed(1)
    tensors = {f"base_model.model.{n}": torch.randn(s, generator=generator) for n, s in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": r, "lora_alpha": 6, "target_modules": list(targets)} | config
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(of)} | content))
    return folder


def plan(folder: Path, *overrides: str) -> Run:
    place = ["hardware=cpu", "data=stdlib", f"output_dir={folder}/out", "data.seq_len=32"]
    return prepare("qwen3", ["task=lora", *place, *overrides])


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan(folder, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_adapter_brings_its_base_and_its_settings(tmp_path: Path) -> None:
    of = base(tmp_path / "base")
    folder = adapter(tmp_path / "adapter", of)
    run = plan(tmp_path, f"task.lora.adapter={folder}")
    assert (run.model.weights, run.model.hidden_size) == (str(of), 32)
    assert (run.task.lora.r, run.task.lora.alpha, run.task.lora.targets) == (2, 6, ["q_proj", "down_proj"])
    run = plan(tmp_path, f"model.weights={of}", "task.lora.targets=[v_proj]", "task.lora.r=5")
    assert (run.task.lora.r, run.task.lora.targets) == (5, ["v_proj"])


def test_an_adapter_for_another_base(tmp_path: Path) -> None:
    of, other = base(tmp_path / "base"), base(tmp_path / "other", seed=1)
    same = base(tmp_path / "copy")
    folder = adapter(tmp_path / "adapter", of)
    named = f"task.lora.adapter={folder}"
    assert f"an adapter for another base, {of}" in refused(tmp_path, named, f"model.weights={other}")
    assert plan(tmp_path, named, f"model.weights={same}").model.weights == str(same)
    wider = base(tmp_path / "wider", hidden_size=40)
    far = adapter(tmp_path / "far", wider)
    message = refused(tmp_path, f"task.lora.adapter={far}")
    assert message.startswith(f"{far}: an adapter for another base") and "model.layers.{0-1}" in message
    gone = adapter(tmp_path / "gone", tmp_path / "nowhere")
    assert "is not a directory here" in refused(tmp_path, f"task.lora.adapter={gone}")
    assert plan(tmp_path, f"task.lora.adapter={gone}", f"model.weights={of}").model.weights == str(of)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True; only plain LoRA is read"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA adapters are read"),
        ({"r": "2"}, "r is '2'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"rank_pattern": {"q_proj(": 3}}, "rank_pattern is {'q_proj(': 3}; regular expressions with a rank for each"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern is"),
        (
            {"rank_pattern": {"(?i)q_proj": 2}},
            "rank_pattern is",
        ),  # flags belong to the beginning, and PEFT puts it later
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj']; regular expressions with a number for each"),
        ({"alpha_pattern": {"q_proj": 8}}, "scales its layers differently; such are not continued, job.merge=true"),
        ({"rank_pattern": {"q_proj": 3}}, "an adapter for another base"),  # its tensors have the rank 2
        ({"target_parameters": "mlp.experts"}, "target_parameters is 'mlp.experts'; a list of names"),
    ],
)
def test_adapters_that_are_not_read(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base(tmp_path / "base"), **config) if "r" not in config else None
    if folder is None:
        folder = adapter(tmp_path / "adapter", base(tmp_path / "base"))
        content = json.loads((folder / "adapter_config.json").read_text()) | config
        (folder / "adapter_config.json").write_text(json.dumps(content))
    assert message in refused(tmp_path, f"task.lora.adapter={folder}")


def test_adapters_of_experts_that_are_divided(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
    family, keys = FAMILY.of("qwen3_moe"), KEYS | experts | {"model_type": "qwen3_moe"}
    config = load_dotted(family.config)(**{k: v for k, v in keys.items() if k != "model_type"})
    of, shapes = tmp_path / "base", load_dotted(family.weights)(config).published
    byte_tokenizer(of)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, of / "model.safetensors")
    (of / "config.json").write_text(json.dumps(keys))
    words = (f"model.weights={of}", "parallelism.tp=2", "parallelism.sp=true", "parallelism.etp=2")
    assert "adapters of experts (model.layers.0.mlp.experts.0" in refused(tmp_path, *words)
    assert plan(tmp_path, *words, "task.lora.targets=[q_proj]").parallelism.etp == 2


def test_settings_that_do_not_go_with_it(tmp_path: Path) -> None:
    of = base(tmp_path / "base")
    folder = adapter(tmp_path / "adapter", of)
    assert "task.lora.r=9: the adapter" in refused(tmp_path, f"task.lora.adapter={folder}", "task.lora.r=9")
    assert "task.lora.adapter=" in refused(tmp_path, f"model.weights={folder}")
    unknown = refused(tmp_path, f"model.weights={of}", "task.lora.targets=[q_proj,w1]")
    assert "no linear layer called w1; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in unknown
    assert "task.lora.targets is empty" in refused(tmp_path, f"model.weights={of}", "task.lora.targets=[]")
    assert "no adapter there, but a model" in refused(tmp_path, f"task.lora.adapter={of}")
    (tmp_path / "empty").mkdir()
    for place, what in (("empty", "there is no adapter_config.json in it"), ("absent", "no such directory")):
        said = refused(tmp_path, f"task.lora.adapter={tmp_path / place}")
        assert what in said and said.endswith("a directory with adapter_config.json and adapter_model.safetensors")
    convert = ["hardware=cpu", "job=convert", f"job.source={of}", "job.merge=true", f"output_dir={tmp_path}/out"]
    with pytest.raises(UserError, match="holds whole weights, no adapter"):
        prepare("qwen3", convert)


@pytest.mark.parametrize("rslora", [False, True])
def test_any_rectangle_of_a_merged_matrix(rslora: bool, tmp_path: Path) -> None:
    of = base(tmp_path / "base")
    folder = adapter(tmp_path / "adapter", of, use_rslora=rslora)
    source = open_weights(folder, FAMILY, read_architecture(folder, FAMILY))
    weights, parts = load_file(of / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    scale = 6 / 2**0.5 if rslora else 6 / 2
    for name, tensor in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in parts:
            tensor = tensor + scale * parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
        whole = tuple(tensor.shape)
        assert torch.allclose(source.read("param", name, whole, (0,) * len(whole), whole), tensor, atol=1e-5), name
        if len(whole) == 2:
            got = source.read("param", name, whole, (3, 5), (7, 1))
            assert torch.allclose(got, tensor[3:10, 5:6], atol=1e-5), name


def test_fresh_adapters_change_nothing_and_are_drawn_as_peft_draws_them() -> None:
    source = fresh_adapters(7)
    down = source.read("param", "x.lora_A.weight", (64, 400), (0, 0), (64, 400))
    assert down.abs().max() <= 1 / 20 and abs(down.std().item() - 1 / 20 / 3**0.5) < 1e-3
    assert not source.read("param", "x.lora_B.weight", (400, 64), (0, 0), (400, 64)).any()
