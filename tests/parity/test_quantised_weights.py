"""A published FP8 directory through shards in a parallel layout: to bf16, and to FP8 again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.dequantise import to_fp8
from engine.cli import prepare
from engine.errors import UserError
from tests import harness
from tests.freezing import freeze
from tests.parity.test_round_trip import there_and_back
from tests.ranks import Ranks

CASE = next(case for case in harness.spine_cases() if not case.experts)
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A directory with FP8 matrices, in blocks that divide neither them nor a rank's share; and its numbers."""
    root = tmp_path_factory.mktemp("fp8")
    folder = harness.weights_directory(CASE, root)
    stored, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = numbers[name] = tensor.to(torch.bfloat16)
        if ".layers." in name and tensor.dim() == 2:
            values, scales = to_fp8(tensor, (16, 32))
            stored |= {name: values, f"{name}_scale_inv": scales}
            wide = scales.repeat_interleave(16, 0)[: tensor.shape[0]].repeat_interleave(32, 1)[:, : tensor.shape[1]]
            numbers[name] = (values.float() * wide).to(torch.bfloat16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"dtype": "bfloat16", "quantization_config": CONFIG}))
    return folder, numbers


@pytest.mark.parametrize("layout", ["megatron-tp2_pp2", pytest.param("native-fsdp2", marks=pytest.mark.slow)])
def test_there_and_back(ranks: Ranks, published: tuple[Path, dict[str, Tensor]], layout: str, tmp_path: Path) -> None:
    folder, numbers = published
    plain = there_and_back(ranks, folder, CASE.family, tmp_path, layout)
    got = load_file(plain / "model.safetensors")
    assert set(got) == set(numbers) and all(torch.equal(got[name], numbers[name]) for name in numbers)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    words = ("job=convert", "job.to=hf", f"job.source={tmp_path / 'sharded'}", f"job.out={tmp_path / 'again'}")
    config = freeze(tmp_path / "to_fp8", CASE.family, *words, "checkpoint.export_dtype=fp8")
    assert ranks.run(config, 1) == [0], (config.parent / "result.json").read_text()
    stored, again = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(stored)
    for name, tensor in stored.items():
        assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape
        if name.endswith("_scale_inv"):
            assert torch.allclose(again[name], tensor, rtol=1e-6, atol=0)
        else:
            assert torch.equal(again[name].float(), tensor.float()), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == CONFIG


def test_fp8_is_for_what_is_published_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="qwen3 is not published in FP8"):
        prepare("qwen3", ["hardware=cpu", "launcher=print", "checkpoint.export_dtype=fp8"])
