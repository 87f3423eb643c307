"""Hugging Face directory -> sharded checkpoint in a parallel layout -> Hugging Face directory: not a byte changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.family import load_dotted
from tests import harness, layouts
from tests.freezing import freeze
from tests.ranks import Ranks

THROUGH = ("megatron-tp2_pp2", "native-fsdp2")
THROUGH_EXPERTS = ("megatron-ep2_etp2", "native-fsdp2", "megatron-ep2_pp2")


def through(case: harness.Case) -> tuple[str, ...]:
    """The layouts on the way; a family besides the spine goes through one of each backend, if it allows it."""
    if case.family == harness.SPINE:
        return THROUGH_EXPERTS if case.experts else THROUGH
    order = ("megatron-ep2_tp2", "megatron-tp2_sp", "megatron-ep2", "megatron-pp2", "megatron-single")
    return (next(layout for layout in order if harness.possible(case, layout)), "native-fsdp2")


def is_quick(case: harness.Case, quick: bool, layout: str) -> bool:
    return quick and case.family == harness.SPINE and layout.startswith("megatron")


CASES = [
    pytest.param(case, layout, id=f"{case}-{layout}", marks=() if is_quick(case, quick, layout) else pytest.mark.slow)
    for case, quick in harness.discover()
    for layout in through(case)
]


def raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """dtype, shape and bytes of every tensor of a directory."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[name] = (
                str(tensor.dtype),
                list(tensor.shape),
                tensor.contiguous().view(torch.uint8).numpy().tobytes(),
            )
    return tensors


def there_and_back(ranks: Ranks, source: Path, family: str, root: Path, layout: str) -> Path:
    backend, world, overrides = harness.LAYOUTS[layout]
    sharded, hf = root / "sharded", root / "hf"
    config = freeze(
        root / "to_sharded",
        family,
        "job=convert",
        "job.to=sharded",
        f"job.out={sharded}",
        f"model.weights={source}",
        f"backend={backend}",
        *overrides,
    )
    assert ranks.run(config, world) == [0] * world, (config.parent / "result.json").read_text()
    config = freeze(root / "to_hf", family, "job=convert", "job.to=hf", f"job.source={sharded}", f"job.out={hf}")
    assert ranks.run(config, 1) == [0], (config.parent / "result.json").read_text()
    return hf


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_every_byte_survives(ranks: Ranks, case: harness.Case, layout: str, tmp_path: Path) -> None:
    source = harness.weights_directory(case, tmp_path)
    out = there_and_back(ranks, source, case.family, tmp_path, layout)
    assert raw(out) == raw(source)
    if case.card.model_type in layouts.LAYOUTS:
        return  # the reference class does not read it
    model = load_dotted(case.card.reference).from_pretrained(out)
    for name, parameter in harness.reference_of(case).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_mixed_dtypes_and_a_stored_tied_head(ranks: Ranks, tmp_path: Path) -> None:
    """A bf16 checkpoint with fp32 norms, whose tied head is stored although it need not be."""
    case = harness.spine_cases()[0]
    source = harness.weights_directory(case, tmp_path)
    tensors = load_file(source / "model.safetensors")
    mixed = {n: t if t.dim() == 1 else t.to(torch.bfloat16) for n, t in tensors.items()}
    aliases = load_dotted(case.card.weights)(load_dotted(case.card.config)(**case.published)).aliases
    for alias, name in aliases.items():
        mixed[alias] = mixed[name].clone()
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(keys))
    out = there_and_back(ranks, source, case.family, tmp_path, "megatron-tp2_pp2")
    assert raw(out) == raw(source)
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}
