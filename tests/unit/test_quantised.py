"""Quantised weights as they are published: read in slices, and FP8 written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.architecture import read_architecture
from engine.checkpoint import quantised
from engine.checkpoint.dequantise import to_fp8
from engine.checkpoint.headers import read_folder
from engine.checkpoint.sources import HFSource
from engine.errors import UserError
from engine.family import load_family

FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


def source_of(folder: Path, tensors: dict[str, Tensor], config: dict | None = None) -> HFSource:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return HFSource(folder)


def random_rectangles(shape: tuple[int, ...], count: int = 40) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and extents anywhere, the whole, a single element and the last one first."""
    generator = torch.Generator().manual_seed(1)
    last = tuple(size - 1 for size in shape)
    found = [((0,) * len(shape), shape), ((0,) * len(shape), (1,) * len(shape)), (last, (1,) * len(shape))]
    for _ in range(count):
        ends = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in shape]
        if all(a < b for a, b in ends):
            found.append((tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return found


def assert_reads(source: HFSource, name: str, whole: Tensor) -> None:
    assert source.shapes[name] == tuple(whole.shape)
    for offset, extent in random_rectangles(tuple(whole.shape)):
        wanted = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
        got = source.read("param", name, tuple(whole.shape), offset, extent)
        assert got.shape == wanted.shape and torch.equal(got.float(), wanted.float()), (offset, extent)


@pytest.mark.parametrize("shape", [(300, 200), (1, 129), (128, 256), (5, 3), (257, 1)], ids=str)
def test_fp8_blocks_of_any_size(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Against torch's own e4m3, block by block."""
    generator = torch.Generator().manual_seed(2)
    values = (60 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator) + 0.01
    whole = values.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            whole[128 * row : 128 * row + 128, 128 * column : 128 * column + 128] *= scales[row, column]
    tensors = {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": torch.ones(3)}
    source = source_of(tmp_path / "w", tensors, FP8_CONFIG)
    assert set(source.shapes) == {"a.weight", "b.weight"} and source.dtypes["a.weight"] == "F8_E4M3"
    assert_reads(source, "a.weight", whole)


def test_fp8_as_transformers_has_it(tmp_path: Path) -> None:
    """Where blocks divide a matrix: there it dequantises, and nowhere else."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values = (60 * torch.randn(256, 384)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.01
    theirs = integration.Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    source = source_of(tmp_path / "w", {"a.weight": values, "a.weight_scale_inv": scales}, FP8_CONFIG)
    assert_reads(source, "a.weight", theirs)


@pytest.mark.parametrize("shape", [(2, 6, 3, 16), (1, 1, 1, 16), (3, 4, 2, 16)], ids=str)
def test_mxfp4_as_transformers_has_it(tmp_path: Path, shape: tuple[int, ...]) -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, shape[:-1], generator=generator, dtype=torch.uint8)
    whole = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = source_of(tmp_path / "w", {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    assert_reads(source, name, whole)


def packed(numbers: Tensor) -> Tensor:
    """Signed 4-bit integers as compressed-tensors packs them, number by number: 8 more than each, lowest bits first."""
    rows, columns = numbers.shape
    words = [[0] * -(-columns // 8) for _ in range(rows)]
    for row in range(rows):
        for column in range(columns):
            words[row][column // 8] |= (int(numbers[row, column]) + 8) << 4 * (column % 8)
    return torch.tensor([[w - (1 << 32) if w >= 1 << 31 else w for w in line] for line in words], dtype=torch.int32)


@pytest.mark.parametrize(("rows", "columns"), [(7, 64), (1, 32), (5, 96)])
def test_packed_int4(tmp_path: Path, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(-8, 8, (rows, columns), generator=generator)
    scales = torch.rand(rows, columns // 32, generator=generator).to(torch.bfloat16)
    whole = numbers.to(torch.bfloat16) * scales.repeat_interleave(32, 1)
    tensors = {
        "a.weight_packed": packed(numbers),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }
    source = source_of(tmp_path / "w", tensors, INT4_CONFIG)
    assert set(source.shapes) == {"a.weight"} and source.dtypes["a.weight"] == "BF16"
    assert_reads(source, "a.weight", whole)
    tensors["a.weight_shape"][1] = columns - 8
    with pytest.raises(UserError, match="weight_shape says"):
        source_of(tmp_path / "v", tensors, INT4_CONFIG).read("param", "a.weight", (rows, columns), (0, 0), (1, 1))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(300, 200), (1, 1), (128, 128)], ids=str)
def test_fp8_written_and_read(tmp_path: Path, shape: tuple[int, int], power_of_two: bool) -> None:
    """An element is off by no more than half a step of e4m3; what is in the format already comes back."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, shape[1])
    matrix[0, 0] = 0
    values, scales = to_fp8(matrix, (128, 128), power_of_two)
    assert not power_of_two or torch.equal(scales.log2(), scales.log2().round())
    source = source_of(tmp_path / "w", {"a.weight": values, "a.weight_scale_inv": scales}, FP8_CONFIG)
    back = source.stored("a.weight")
    step = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    # 3 bits of mantissa; below 2**-6 steps of 2**-9.
    assert ((back - matrix).abs() <= (matrix.abs() / 16).maximum(step * 2**-10) * 1.001).all()
    again, same = to_fp8(back, (128, 128), power_of_two)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.allclose(same, scales, rtol=1e-6)


def test_a_block_of_zeros_has_a_scale() -> None:
    values, scales = to_fp8(torch.zeros(130, 4), (128, 128))
    assert (values.float() == 0).all() and (scales == 1).all()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ("fp8", "not an object"),
    ],
    ids=str,
)
def test_other_formats_are_refused(tmp_path: Path, config: object, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": config}))
    with pytest.raises(UserError, match="quantization_config") as caught:
        read_architecture(tmp_path, load_family("qwen3"))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    values = torch.zeros(300, 200).to(torch.float8_e4m3fn)
    save_file({"a.weight": values, "a.weight_scale_inv": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    infos = read_folder(tmp_path)
    (line,) = quantised.wrong_scales(infos, quantised.find(infos))
    assert "a.weight_scale_inv has shape [2, 2]" in line and "[3, 2]" in line
    assert load_file(tmp_path / "model.safetensors")["a.weight"].dtype == torch.float8_e4m3fn
