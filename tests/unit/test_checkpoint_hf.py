"""Hugging Face -> sharded -> Hugging Face: the same names, dtypes, shapes and bytes."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from zoo.qwen3.config import Qwen3Config

from engine.architecture import find_weights
from engine.backends.base import Slice
from engine.checkpoint import hf as hf_module
from engine.checkpoint.agree import Alone
from engine.checkpoint.hf import export_hf
from engine.checkpoint.origin import make_card
from engine.checkpoint.sharded import save_sharded
from engine.checkpoint.sources import HFSource, open_weights
from engine.checkpoint.tensor_file import TensorFile
from engine.errors import UserError
from engine.family import load_family
from engine.llm.grouped import weight_map
from engine.schema import Precision, Run, Task, TrainJob
from tests.unit.test_checkpoint_sharded import bits, cut, on_ranks, tiles
from tests.unit.test_checkpoint_sources import random_weights, tiny, write_hf

FAMILY = load_family("qwen3")
ODD_CONFIG = '{\n    "model_type":"qwen3", "vocab_size": 13, "torch_dtype": "bfloat16",\n\n "unknown_key": [1]}\n'


def run_of(config: Qwen3Config, weights: Path | None = None, precision: str = "fp32") -> Run:
    config.weights = str(weights) if weights else None
    return Run(family="qwen3", model=config, precision=Precision(name=precision), job=TrainJob(), task=Task("pretrain"))


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything that the safetensors files of a folder hold."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                tensor = handle.get_tensor(name)
                found[name] = (str(tensor.dtype), tuple(tensor.shape), bits(tensor))
    return found


def shard(source: HFSource, config: Qwen3Config, folder: Path, run: Run, world: int = 3) -> Path:
    """What a backend in fp32 does: every rank yields random parts of the parameters in its own dtype."""
    dice, shares = random.Random(1), [[] for _ in range(world)]  # type: list[list[Slice]]
    for name, shape in weight_map(config).published.items():
        whole = source.read("param", name, shape, (0,) * len(shape), shape).float()
        for offset, extent in tiles(dice, shape):
            shares[dice.randrange(world)].append(Slice("param", name, shape, offset, cut(whole, offset, extent)))
    card = make_card(run, FAMILY)
    results = on_ranks(world, lambda c: save_sharded(folder, shares[c.rank], {"step": 0}, c, card))
    assert results == [folder] * world
    return folder


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("names", ["untied", "tied", "tied and stored twice", "tied, only the head stored"])
def test_round_trip(tmp_path: Path, names: str, shards: int) -> None:
    config = tiny(tie_word_embeddings=names != "untied", num_hidden_layers=2)
    tensors = random_weights(config)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].float() * 1.000001  # fp32 norms in a bf16 directory
    tensors["model.norm.weight"] = torch.tensor([float("inf"), -0.0, 1e-40, 0, 1, 2])
    embed = tensors["model.embed_tokens.weight"]
    if "twice" in names:
        tensors["lm_head.weight"] = embed.clone()
    if "only" in names:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    folder = write_hf(tmp_path / "hf", tensors, shards)
    (folder / "config.json").write_text(ODD_CONFIG)
    (folder / "generation_config.json").write_text('{"top_k": 7}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not part of a model")
    run = run_of(config, folder)
    source = open_weights(folder, FAMILY, config)
    assert isinstance(source, HFSource)
    checkpoint = shard(source, config, tmp_path / "step_00000000", run)
    limit = 10**9 if shards == 1 else 400
    results = on_ranks(2, lambda c: export_hf(checkpoint, tmp_path / "out", comm=c, max_shard_bytes=limit))
    assert results == [tmp_path / "out"] * 2
    assert stored(tmp_path / "out") == stored(folder)
    assert (tmp_path / "out" / "config.json").read_text() == ODD_CONFIG
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k": 7}'
    others = {p.name for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors"}
    index = {"model.safetensors.index.json"} if shards == 2 else set()
    assert others == {"config.json", "generation_config.json", "tokenizer.json"} | index


def test_shards_and_their_index(tmp_path: Path) -> None:
    config = tiny()
    tensors = random_weights(config, torch.float32)
    folder = write_hf(tmp_path / "hf", tensors)
    checkpoint = shard(open_weights(folder, FAMILY, config), config, tmp_path / "step_00000000", run_of(config, folder))  # type: ignore[arg-type]
    out = export_hf(checkpoint, tmp_path / "out", max_shard_bytes=500)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert set(index["weight_map"]) == set(tensors) and set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safe_open(str(out / file), framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118
            assert sum(handle.get_tensor(k).numel() * 4 for k in handle.keys()) <= 500 or len(handle.keys()) == 1  # noqa: SIM118
    again = open_weights(out, FAMILY, config)
    assert torch.equal(again.read("param", "model.norm.weight", (6,), (0,), (6,)), tensors["model.norm.weight"])


def fresh(tmp_path: Path, precision: str = "bf16", **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of a run from scratch."""
    config = tiny(**changes)
    tensors = random_weights(config, torch.float32)
    card = make_card(run_of(config, precision=precision), FAMILY, eos_id=5)
    slices = [Slice("param", n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()]
    slices += [Slice("exp_avg", n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()]
    return save_sharded(tmp_path / "step_00000005", slices, {"step": 5}, Alone(), card), tensors


def test_export_of_a_run_from_scratch(tmp_path: Path) -> None:
    checkpoint, tensors = fresh(tmp_path)
    out = export_hf(checkpoint, tmp_path / "hf")
    assert stored(out) == {n: ("torch.bfloat16", tuple(t.shape), bits(t.bfloat16())) for n, t in tensors.items()}
    with safe_open(str(out / "model.safetensors"), framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}  # transformers refuses files without it
    config = json.loads((out / "config.json").read_text())
    wanted = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 6}
    wanted |= {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "head_dim": 4, "eos_token_id": 5}
    assert wanted.items() <= config.items() and not {"name", "weights"} & set(config)
    assert json.loads((out / "generation_config.json").read_text()) == {"_from_model_config": True, "eos_token_id": 5}


def test_another_dtype(tmp_path: Path) -> None:
    checkpoint, tensors = fresh(tmp_path)
    out = export_hf(checkpoint, tmp_path / "hf", "F16")
    assert stored(out) == {n: ("torch.float16", tuple(t.shape), bits(t.half())) for n, t in tensors.items()}
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float16"


def test_an_existing_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    checkpoint, _ = fresh(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    export_hf(checkpoint, mine)  # empty: nothing is lost
    (mine / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="is there already"):
        export_hf(checkpoint, mine)
    assert (mine / "notes.txt").exists()
    export_hf(checkpoint, mine, replace=True)
    assert not (mine / "notes.txt").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "step_00000005"}


@pytest.mark.parametrize("before", [1, 2])
def test_an_export_that_is_killed_between_its_renames_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    checkpoint, _ = fresh(tmp_path)
    run, calls, rename = tmp_path / "run", [], Path.rename
    export_hf(checkpoint, run / "hf", replace=True)
    weights = stored(run / "hf")

    def killed(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) >= before:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, run / "hf", replace=True)
    monkeypatch.undo()
    assert stored(find_weights(str(run))) == weights
    export_hf(checkpoint, run / "hf", replace=True)
    assert [path.name for path in run.iterdir()] == ["hf"] and stored(run / "hf") == weights


def test_a_checkpoint_never_replaces_something_else(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="is no checkpoint"):
        save_sharded(tmp_path / "home", [], {}, Alone())
    assert (tmp_path / "home" / "notes.txt").exists()


def test_full_disk_leaves_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = fresh(tmp_path)
    out = export_hf(checkpoint, tmp_path / "hf")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def refuse(self: TensorFile, key: str, tensor: Tensor) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "add", refuse)
        with pytest.raises(UserError, match="No space left"):
            export_hf(checkpoint, out, replace=True)
    monkeypatch.setattr(hf_module.shutil, "disk_usage", lambda _: type("U", (), {"free": 10}))
    with pytest.raises(UserError, match="no room"):
        export_hf(checkpoint, out, replace=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "step_00000005"}


def test_a_checkpoint_without_a_card_cannot_be_exported(tmp_path: Path) -> None:
    part = Slice("param", "w", (1,), (0,), torch.zeros(1))
    folder = save_sharded(tmp_path / "step_00000001", [part], {}, Alone())
    with pytest.raises(UserError, match=r"has no config\.json"):
        export_hf(folder, tmp_path / "hf")


def test_card_of_a_resumed_run_is_the_checkpoint_s(tmp_path: Path) -> None:
    """Names, dtypes and files of the directory that the first run began from survive any number of resumes."""
    config = tiny()
    folder = write_hf(tmp_path / "hf", random_weights(config))
    (folder / "config.json").write_text(ODD_CONFIG)
    first = make_card(run_of(config, folder), FAMILY)
    source = open_weights(folder, FAMILY, config)
    checkpoint = shard(source, config, tmp_path / "step_00000001", run_of(config, folder))  # type: ignore[arg-type]
    again = make_card(run_of(tiny()), FAMILY, resumed=checkpoint)
    assert again.stored == first.stored == dict.fromkeys(weight_map(config).published, "BF16")
    assert again.texts == first.texts
