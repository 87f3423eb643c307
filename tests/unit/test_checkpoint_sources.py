"""First weights: random values by name, and Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from zoo.qwen3.config import Qwen3Config

from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card
from engine.checkpoint.sharded import save_sharded
from engine.checkpoint.sources import HFSource, InitSource, open_weights
from engine.errors import UserError
from engine.family import load_family
from engine.llm.grouped import weight_map
from tests.unit.test_checkpoint_sharded import bits, rows


def tiny(**changes: Any) -> Qwen3Config:
    sizes = {"vocab_size": 13, "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}
    return Qwen3Config(name="test", **(sizes | heads | changes))


def random_weights(config: Qwen3Config, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in weight_map(config).published.items()}


def test_init_depends_on_seed_and_name_only() -> None:
    """Read in any order and in any pieces: the same numbers."""
    whole = InitSource(7, 0.02).read("param", "a.weight", (50, 30), (0, 0), (50, 30))
    other = InitSource(7, 0.02)
    other.read("param", "b.weight", (5, 5), (0, 0), (5, 5))
    pieces = [other.read("param", "a.weight", (50, 30), (r, 0), (10, 30)) for r in range(0, 50, 10)]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(InitSource(8, 0.02).read("param", "a.weight", (50, 30), (0, 0), (50, 30)), whole)
    assert not torch.equal(other.read("param", "c.weight", (50, 30), (0, 0), (50, 30)), whole)
    assert whole.dtype == torch.float32
    # Mean and deviation of 1500 draws: five standard errors.
    assert abs(whole.mean().item()) < 5 * 0.02 / 1500**0.5
    assert abs(whole.std().item() - 0.02) < 5 * 0.02 / 3000**0.5


def test_init_rules_and_private_results() -> None:
    source = InitSource(7, 0.02)
    assert source.read("param", "layers.0.input_layernorm.weight", (4,), (1,), (2,)).tolist() == [1, 1]
    assert source.read("param", "q_proj.bias", (4,), (0,), (4,)).tolist() == [0] * 4
    assert source.read("exp_avg", "a.weight", (4, 2), (0, 0), (4, 2)).tolist() == [[0, 0]] * 4
    got = source.read("param", "a.weight", (4, 2), (0, 0), (4, 2))
    got.zero_()
    assert source.read("param", "a.weight", (4, 2), (0, 0), (4, 2)).abs().sum() > 0


def test_init_cache_is_bounded() -> None:
    source = InitSource(7, 0.02, cache_bytes=1000)
    for i in range(10):
        source.read("param", f"{i}.weight", (10, 10), (0, 0), (1, 10))
    assert len(source._cache) == 2


def write_hf(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_hf_reads_stored_bits(tmp_path: Path, shards: int) -> None:
    config = tiny()
    tensors = random_weights(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    source = open_weights(write_hf(tmp_path / "hf", tensors, shards), load_family("qwen3"), config)
    assert isinstance(source, HFSource)
    assert source.dtypes == {n: "F32" if t.dtype == torch.float32 else "BF16" for n, t in tensors.items()}
    got = source.read("param", "model.embed_tokens.weight", (13, 6), (2, 1), (11, 5))
    assert bits(got) == bits(tensors["model.embed_tokens.weight"][2:, 1:])
    assert source.read("param", "model.norm.weight", (6,), (0,), (6,)).dtype == torch.float32
    with pytest.raises(UserError, match="weights only"):
        source.read("exp_avg", "model.norm.weight", (6,), (0,), (6,))


def test_hf_ties(tmp_path: Path) -> None:
    """A tied embedding may be stored under either name or both; both must agree."""
    config, family = tiny(), load_family("qwen3")
    tensors = random_weights(config)
    embed = tensors["model.embed_tokens.weight"]
    head_only = {k: v for k, v in tensors.items() if k != "model.embed_tokens.weight"} | {"lm_head.weight": embed}
    source = open_weights(write_hf(tmp_path / "head", head_only), family, config)
    assert torch.equal(source.read("param", "model.embed_tokens.weight", (13, 6), (0, 0), (13, 6)), embed)
    open_weights(write_hf(tmp_path / "both", tensors | {"lm_head.weight": embed.clone()}), family, config)
    with pytest.raises(UserError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        open_weights(write_hf(tmp_path / "differ", tensors | {"lm_head.weight": embed + 1}), family, config)


def test_hf_lists_all_that_does_not_fit(tmp_path: Path) -> None:
    config, family = tiny(tie_word_embeddings=False), load_family("qwen3")
    tensors = random_weights(config)
    del tensors["lm_head.weight"], tensors["model.layers.0.self_attn.k_norm.weight"]
    tensors["model.norm.weight"] = torch.zeros(7)
    with pytest.raises(UserError) as caught:
        open_weights(write_hf(tmp_path / "hf", tensors), family, config)
    text = str(caught.value)
    assert "missing: lm_head.weight" in text
    assert "missing: model.layers.0.self_attn.k_norm.weight" in text
    assert "misshapen: model.norm.weight has shape [7]" in text


def test_hf_missing_and_damaged_files(tmp_path: Path) -> None:
    config, family = tiny(), load_family("qwen3")
    with pytest.raises(UserError, match="no weights here"):
        open_weights(tmp_path, family, config)
    folder = write_hf(tmp_path / "hf", random_weights(config), shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: .*truncated"):
        open_weights(folder, family, config)
    shard.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: missing"):
        open_weights(folder, family, config)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of", "../model-00002-of"))
    with pytest.raises(UserError, match="not a safetensors file of this folder"):
        open_weights(folder, family, config)


def test_checkpoint_and_run_folder_as_weights(tmp_path: Path) -> None:
    config, family = tiny(), load_family("qwen3")
    tensors = random_weights(config, torch.float32)
    slices = [s for n, t in tensors.items() for s in rows(n, t, [])]
    folder = save_sharded(tmp_path / "run" / "checkpoints" / "step_00000002", slices, {}, Alone(), Card("qwen3"))
    for path in (folder, tmp_path / "run"):
        got = open_weights(path, family, config).read("param", "model.norm.weight", (6,), (0,), (6,))
        assert torch.equal(got, tensors["model.norm.weight"])
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.") as caught:
        open_weights(folder, family, tiny(num_hidden_layers=2))
    assert str(caught.value).count("missing: ") == 11
