"""`model.weights=DIR`: the directory's config is the model, and its tensors are checked before anything starts."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.architecture import read_architecture
from engine.checkpoint.headers import by_layer, mismatches, read_folder, read_header
from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_family

QWEN3 = load_family("qwen3")
# Odd sizes: 3 heads of 6 over a width of 10, one key-value head, 11 tokens.
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
SMALL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 10,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "use_cache": True,
}
LAYER = {
    "input_layernorm.weight": (10,),
    "self_attn.q_proj.weight": (18, 10),
    "self_attn.k_proj.weight": (6, 10),
    "self_attn.v_proj.weight": (6, 10),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "self_attn.o_proj.weight": (10, 18),
    "post_attention_layernorm.weight": (10,),
    "mlp.gate_proj.weight": (7, 10),
    "mlp.up_proj.weight": (7, 10),
    "mlp.down_proj.weight": (10, 7),
}


def small_tensors():
    shapes = {"model.embed_tokens.weight": (11, 10), "model.norm.weight": (10,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}
TOKENIZER["added_tokens"] = [{"id": 10, "content": "</s>", "special": True}]


def write(folder, config=SMALL, tensors=None, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    tensors = small_tensors() if tensors is None else tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, places = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
        places |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def planned(folder, *overrides):
    return prepare("qwen3", ["hardware=cpu", "data.seq_len=64", f"model.weights={folder}", *overrides])


def refusal(folder, *overrides):
    with pytest.raises(UserError) as error:
        planned(folder, *overrides)
    return str(error.value)


def test_the_directory_decides_the_architecture(tmp_path):
    model = planned(write(tmp_path / "hf")).model
    for key in set(SMALL) - {"model_type", "architectures", "torch_dtype", "use_cache"}:
        assert getattr(model, key) == SMALL[key], key
    assert model.name == "custom" and model.weights == str(tmp_path / "hf")
    assert model.rms_norm_eps == 1e-6  # not in the file: the reference's default


def test_both_spellings_of_rotary_settings(tmp_path):
    new = {k: v for k, v in SMALL.items() if not k.startswith("rope")}
    plain = {"rope_parameters": {"rope_theta": 50000, "rope_type": "default"}}
    assert planned(write(tmp_path / "a", new | plain)).model == dataclasses.replace(
        planned(write(tmp_path / "b")).model, weights=str(tmp_path / "a")
    )
    yarn = {"rope_type": "yarn", "factor": 4.0}
    new_yarn = read_architecture(write(tmp_path / "c", new | {"rope_parameters": {"rope_theta": 5e4, **yarn}}), QWEN3)
    old_yarn = read_architecture(write(tmp_path / "d", SMALL | {"rope_scaling": yarn}), QWEN3)
    assert new_yarn == old_yarn and old_yarn.rope_scaling == yarn and old_yarn.rope_theta == 50000.0


def test_a_published_size_is_recognised(tmp_path):
    sizes = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
    }
    published = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    published |= sizes | {"rope_theta": 1000000, "tie_word_embeddings": True, "eos_token_id": [151645, 151643]}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = read_architecture(tmp_path, QWEN3)
    assert (model.name, model.eos_token_id) == ("0_6b", 151645)


def test_naming_what_differs_is_an_error_with_both_values(tmp_path):
    folder = write(tmp_path / "hf")
    text = refusal(folder, "model=tiny")
    assert "model=tiny disagrees" in text and "hidden_size=256 against 10" in text and len(text.splitlines()) == 1
    keys = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
    assert all(key in text for key in keys.split())
    text = refusal(folder, "model.hidden_size=12")
    assert "hidden_size=12 against 10" in text and len(text.splitlines()) == 1
    model = planned(folder, "model.hidden_size=10", "model.initializer_range=0.5").model  # agrees; changes no weight
    assert model.hidden_size == 10 and model.initializer_range == 0.5


def test_shards_and_an_alias_are_whole(tmp_path):
    tensors = small_tensors()
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    planned(write(tmp_path / "hf", tensors=tensors, shards=3))
    assert len(read_folder(tmp_path / "hf")) == 2 + 2 * len(LAYER)


def test_missing_and_misshapen_tensors_are_listed_together(tmp_path):
    tensors = small_tensors()
    for i in range(2):
        del tensors[f"model.layers.{i}.self_attn.q_norm.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((8, 10), np.float32)
    text = refusal(write(tmp_path / "hf", tensors=tensors))
    assert text.splitlines()[1:] == [
        "  missing: model.layers.{0-1}.self_attn.q_norm.weight",
        "  missing: model.norm.weight",
        "  misshapen: model.layers.1.mlp.up_proj.weight has shape [8, 10], the config makes it [7, 10]",
    ]


def test_what_a_directory_can_lack(tmp_path):
    assert "no such directory" in refusal(tmp_path / "absent")
    assert "not downloaded" in refusal("Qwen/Qwen3-8B")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    only = tmp_path / "only"
    only.mkdir()
    (only / "config.json").write_text(json.dumps(SMALL))
    assert "holds no weights" in refusal(only)
    (only / "pytorch_model.bin").write_text("x")
    assert "pickled" in refusal(only)
    (only / "config.json").write_text("{")
    assert "JSON" in refusal(only)
    folder = write(tmp_path / "hf", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    text = refusal(folder)
    assert "model-00002-of-00003.safetensors: missing" in text and len(text.splitlines()) == 1


def test_another_family_and_wrong_types(tmp_path):
    text = refusal(write(tmp_path / "a", SMALL | {"model_type": "llama"}))
    assert "'llama'" in text and "'qwen3'" in text
    text = refusal(write(tmp_path / "b", SMALL | {"hidden_size": "wide"}))
    assert "hidden_size='wide'" in text
    assert "sliding_attention" in refusal(write(tmp_path / "c", SMALL | {"layer_types": ["sliding_attention"] * 2}))
    assert "num_key_value_heads" in refusal(write(tmp_path / "d", SMALL | {"num_key_value_heads": 2}))


@pytest.mark.parametrize("cut", [0, 5, 8, 40, -1])
def test_truncated_files(tmp_path, cut):
    folder = write(tmp_path / "hf")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    text = refusal(folder)
    assert str(file) in text and len(text.splitlines()) == 1
    assert "truncated" in text or "does not begin" in text


def header_file(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"{",
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": 3},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_headers_that_lie(tmp_path, header):
    with pytest.raises(UserError, match="not a whole safetensors file"):
        read_header(header_file(tmp_path / "x.safetensors", header, b"\0" * 4))


def test_a_huge_header_is_not_read(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(UserError):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "x.bin", 3, ""])
def test_an_index_cannot_point_out_of_its_folder(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match="not a safetensors file of this folder"):
        read_folder(tmp_path)


def test_names_of_one_kind_share_a_line():
    names = [f"m.{i}.w" for i in (0, 1, 2, 5, 7, 8)] + ["norm", "m.0.b", "x.3.w"]
    assert by_layer(names) == ["m.{0-2,5,7-8}.w", "norm", "m.0.b", "x.3.w"]
    assert mismatches({"a": (1,)}, {"a": (1,), "b": ()}, {}) == ["missing: b"]


def test_a_run_folder_stands_for_its_model(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("x")
    assert "run folder without hf/" in refusal(run)
    write(run / "hf")
    (tmp_path / "latest").symlink_to("run")
    run_config = planned(tmp_path / "latest")
    assert run_config.model.weights == str(run / "hf")  # not through the link: it moves when this run starts
    assert planned(tmp_path / "latest").data.tokenizer == str(run / "hf")
    other = write(tmp_path / "other")
    assert planned(tmp_path / "latest", f"data.tokenizer={other}").data.tokenizer == str(other)


def test_mistakes_in_a_config_name_its_file(tmp_path):
    """Each is one line that begins with the file, since the user typed none of it."""
    for number, (change, words) in enumerate(
        [
            ({"hidden_act": "gelu"}, ["hidden_act=gelu", "backend=native has it"]),
            ({"attention_dropout": 0.5}, ["attention_dropout=0.5"]),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ["rope_scaling", "dynamic"]),
            ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, ["sliding_window=0"]),
            (WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "full_attention, "]),
            ({"bos_token_id": 11}, ["bos_token_id=11", "vocab_size=11"]),
            ({"eos_token_id": [3, 12]}, ["eos_token_id=12"]),
            ({"head_dim": 5}, ["head_dim=5"]),
            ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
            ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ]
    ):
        folder = write(tmp_path / str(number), SMALL | change)
        text = refusal(folder)
        assert len(text.splitlines()) == 1 and text.startswith(str(folder / "config.json")), text
        assert [word for word in words if word not in text] == [], text
    planned(write(tmp_path / "inert", SMALL | {"sliding_window": 4096}))  # as published files have it
    planned(write(tmp_path / "same", SMALL | WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "10"}, "hidden_size='10' is a string; a whole number should be there"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 is not a whole number; a whole number should be there"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is a truth value; a whole number should be there"),
        ({"vocab_size": None}, "vocab_size=None is null; a whole number should be there"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is a string; a number should be there"),
        ({"rms_norm_eps": False}, "rms_norm_eps=False is a truth value; a number should be there"),
        ({"rope_theta": float("nan")}, "rope_theta=nan is not finite; a number should be there"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' is a string; a number should be there"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings='true' is a string; true or false should be there"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is a number; true or false should be there"),
        ({"hidden_act": 3}, "hidden_act=3 is a number; a string should be there"),
        ({"rope_scaling": [4]}, "rope_scaling=[4] is a list; an object or null should be there"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=['</s>'] is a list; a whole number or null should be there"),
        ({"layer_types": 3}, "layer_types holds 3"),
    ],
)
def test_values_of_another_type_are_refused_with_file_and_key(tmp_path, change, words):
    folder = write(tmp_path / "hf", SMALL | change)
    text = refusal(folder)
    assert text.startswith(f"{folder / 'config.json'}: {words}") and len(text.splitlines()) == 1, text


def test_all_wrong_types_are_listed_and_a_whole_number_is_a_float(tmp_path):
    folder = write(tmp_path / "hf", SMALL | {"hidden_size": "10", "head_dim": "6", "rope_theta": 50000})
    assert [line.split(": ")[1].split("=")[0] for line in refusal(folder).splitlines()] == ["hidden_size", "head_dim"]
    assert planned(write(tmp_path / "b", SMALL | {"rope_theta": 50000})).model.rope_theta == 50000.0
    moe = {"model_type": "qwen3_moe", "mlp_only_layers": [0, "1"]}
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(moe))
    with pytest.raises(UserError, match=r"mlp_only_layers=\[0, '1'\] is a list; a list, each item a whole number"):
        read_architecture(tmp_path / "moe", QWEN3)


def test_numbers_that_are_no_weights(tmp_path):
    tensors = small_tensors()
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = np.zeros((7, 10), np.int8)
    tensors["rotary.position_ids"] = np.zeros(3, np.int64)  # of no use to the model: of no interest either
    tensors["lm_head.weight"] = np.zeros((11, 10), np.float16)
    lines = refusal(write(tmp_path / "hf", tensors=tensors)).splitlines()
    assert lines[1].startswith("  wrong type: model.layers.{0-1}.mlp.up_proj.weight has dtype I8")
    assert (
        lines[2].startswith("  untied: lm_head.weight is F16 and model.embed_tokens.weight is F32") and len(lines) == 3
    )


def test_weights_without_a_tokenizer_get_no_new_one_unasked(tmp_path):
    folder = write(
        tmp_path / "hf",
        SMALL | {"vocab_size": 300},
        small_tensors() | {"model.embed_tokens.weight": np.zeros((300, 10), np.float32)},
    )
    assert planned(folder).data.tokenizer == str(folder)
    (folder / "tokenizer.json").unlink()
    for words in ([], ["job=prepare"], ["job=sample", "prompt=x"]):
        assert "there is no tokenizer in it" in refusal(folder, *words)
    assert planned(folder, "data.vocab_size=270").data.vocab_size == 270
    (tmp_path / "tok").mkdir()
    assert "no tokenizer in" in refusal(folder, f"data.tokenizer={tmp_path / 'tok'}")
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    assert "cannot be read as a tokenizer" in refusal(folder, f"data.tokenizer={tmp_path / 'tok'}")
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"added_tokens": []}))
    assert "names no end of text" in refusal(folder, f"data.tokenizer={tmp_path / 'tok'}")
    large = {"added_tokens": [{"id": 300, "content": "</s>"}]}
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(TOKENIZER | large))
    assert "has 301 tokens, but model.vocab_size=300" in refusal(folder, f"data.tokenizer={tmp_path / 'tok'}")
