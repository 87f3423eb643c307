"""Tokenizers: the trained byte-level BPE, directories, ends of text and bytes for each token."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from engine.data.bpe import save_bpe, train_bpe
from engine.data.token_bytes import token_bytes
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from tests.unit.data_corpora import byte_tokenizer, make_run, open_data, write_jsonl

TEXT = "def f(x):\n    return x + 1  # né 漢字 \U0001f600\r\n\tif not x: print('don't', 12345)\n\n\n" * 20
STRANGE = "\x00\x7f \ufeff e\u0301 \u200b\U0010ffff   \t\n\r\n ſ"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    save_bpe(train_bpe(iter([TEXT]), 400), folder)
    return load_tokenizer(folder)


def test_trained_tokens_give_the_text_back(trained):
    for text in (TEXT, STRANGE, "", " ", "\n"):
        assert trained.decode(trained.encode(text)) == text
        assert [array.tolist() for array in trained.encode_batch([text, text])] == [trained.encode(text)] * 2
    assert trained.vocab_size <= 400 and len(trained.encode(TEXT)) < len(TEXT.encode()) / 2
    assert trained.decode([trained.eos_id]) == "<|endoftext|>" and trained.dtype == np.uint16


def test_token_bytes_add_up_to_the_text(trained):
    for text in (TEXT, STRANGE):
        assert trained.token_bytes[trained.encode(text)].sum() == len(text.encode("utf-8"))
    assert trained.token_bytes[trained.eos_id] == 0


def test_token_bytes_of_byte_fallback_and_of_others():
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3} | {f"<0x{i:02X}>": 4 + i for i in range(256)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(["<s>"])
    core.add_tokens(["<tool>"])
    sizes = token_bytes(core)
    for text in ("a a  aé", "\U0001f600<tool> a"):
        assert sizes[core.encode(text).ids].sum() == len(text.encode())
    assert sizes[core.token_to_id("<s>")] == 0
    core.decoder = decoders.WordPiece()
    assert token_bytes(core) is None
    assert token_bytes(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None


def test_training_is_the_same_in_another_process(trained, tmp_path):
    code = (
        "import pathlib, sys; from engine.data.bpe import save_bpe, train_bpe\n"
        "folder = pathlib.Path(sys.argv[1]); text = (folder / 'text').read_bytes().decode()\n"
        "save_bpe(train_bpe(iter([text]), 400), folder)"
    )
    (tmp_path / "text").write_bytes(TEXT.encode())
    environment = os.environ | {"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment)
    assert (tmp_path / "tokenizer.json").read_bytes() == (trained.folder / "tokenizer.json").read_bytes()


def test_transformers_loads_what_was_saved(trained, tmp_path):
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded(TEXT + STRANGE)["input_ids"] == trained.encode(TEXT + STRANGE)
    assert (
        loaded.eos_token_id == trained.eos_id and loaded.pad_token_id is not None and len(loaded) == trained.vocab_size
    )


def test_saving_copies_no_weights(trained, tmp_path):
    (trained.folder / "model.safetensors").write_text("")
    trained.save(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_truncation_and_padding_of_a_published_tokenizer_do_not_count(tmp_path):
    core = byte_tokenizer(tmp_path)
    core.enable_truncation(3)
    core.enable_padding(length=9)
    core.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("12345")) == 5


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "<b>"}}, "config.json": {"eos_token_id": 256}}, 258),
        ({"special_tokens_map.json": {"eos_token": "<a>"}}, 257),
        ({"generation_config.json": {"eos_token_id": [258, 256]}, "config.json": {"eos_token_id": 257}}, 258),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 257}}, 257),
        ({}, 256),
    ],
)
def test_where_the_end_of_text_is_found(tmp_path, files, eos):
    core = byte_tokenizer(tmp_path)
    core.add_special_tokens(["<a>", "<b>"])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).eos_id == eos


def test_bad_directories(tmp_path):
    with pytest.raises(UserError, match="not a directory"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json' cannot be read"):
        load_tokenizer(tmp_path)
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="names no end of text"):
        load_tokenizer(tmp_path)


def test_vocabularies_that_do_not_fit(tmp_path):
    path = write_jsonl(tmp_path / "docs.jsonl", [TEXT])
    with pytest.raises(UserError, match=r"257 tokens, but model.vocab_size=256"):
        open_data(make_run(tmp_path, path, model_vocab=256))
    with pytest.raises(UserError, match=r"data.vocab_size=500 is more than model.vocab_size=400"):
        open_data(make_run(tmp_path, path, model_vocab=400, vocab_size=500, tokenizer=None))
    with pytest.raises(UserError, match="at least 257 tokens"):
        open_data(make_run(tmp_path, path, tokenizer=None, model_vocab=256))


def test_the_run_trains_one_and_keeps_it(tmp_path):
    path = write_jsonl(tmp_path / "docs.jsonl", [TEXT, TEXT])
    run = make_run(tmp_path, path, tokenizer=None)
    first, second = open_data(run), open_data(run)
    first.close(), second.close()
    folder = first.tokenizer.folder
    assert folder == second.tokenizer.folder and folder.parent == tmp_path / "out" / "cache"
    bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert bare.encode(TEXT).ids == first.tokenizer.encode(TEXT)
    other = open_data(make_run(tmp_path, path, vocab_size=280, tokenizer=None))
    other.close()
    assert other.tokenizer.folder != folder and other.tokenizer.vocab_size <= 280
