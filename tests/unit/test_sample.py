"""job=sample against transformers' own greedy continuation, and the prompts and weights that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.errors import UserError
from engine.family import load_family
from engine.jobs.sample import generate

CONTEXT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are words, with a context of 12."""
    folder = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(["<end>", "a", "b", "c", "d"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=5, max_position_embeddings=CONTEXT, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def sample(folder: Path, prompt: str, tokens: int = 4) -> str:
    hardware = SimpleNamespace(device=lambda rank: torch.device("cpu"))
    run = SimpleNamespace(seed=0)
    context = SimpleNamespace(hardware=hardware, local_rank=0, family=load_family("qwen3"), run=run)
    return generate(context, folder, prompt, tokens, temperature=0.0, top_k=1)


def test_greedy_is_the_references(folder: Path) -> None:
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a b", return_tensors="pt").input_ids
    for _ in range(4):
        with torch.inference_mode():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        if ids[0, -1] == 0:
            break
    assert sample(folder, "a b") == tokenizer.decode(ids[0, 2:], skip_special_tokens=True)


def test_it_stops_where_the_context_ends(folder: Path) -> None:
    assert len(sample(folder, "a " * (CONTEXT - 2), tokens=50).split()) <= 2


@pytest.mark.parametrize(("prompt", "words"), [("", "no token"), ("a " * CONTEXT, f"ends at {CONTEXT}")])
def test_prompts_without_a_place(folder: Path, prompt: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        sample(folder, prompt)


def test_weights_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match="NaN"):
        sample(tmp_path, "a b")
