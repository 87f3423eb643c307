"""Composition: groups, values, free text, suggestions, and the frozen file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import prepare
from engine.compose import _compose_groups, compose, family_folder, group_options
from engine.errors import UserError
from engine.family import load_family
from engine.freeze import load_run, to_yaml
from engine.schema import SCHEMA_VERSION, ForwardJob, TrainJob

QWEN3 = load_family("qwen3")
ROOT = Path(__file__).parents[2]


def composed(*overrides):
    return compose(QWEN3, list(overrides)).run


def test_defaults_are_the_tiny_run():
    run = composed()
    assert (run.family, run.model.name, run.model.vocab_size, run.data.name) == ("qwen3", "tiny", 4096, "stdlib")
    assert (run.hardware.name, run.parallelism.name, run.precision.name) == ("auto", "single", "fp32")
    assert (run.schedule.name, run.launcher.name, run.task.name) == ("cosine", "local", "pretrain")
    assert isinstance(run.job, TrainJob) and run.backend == "megatron"


# Parameters of the layouts as their names spell them: tp, pp, dp, sp, strategy, shard_size.
LAYOUTS = {
    "single": (1, 1, 1, False, "zero1", None),
    "dp2": (1, 1, 2, False, "zero1", None),
    "ddp": (1, 1, None, False, "ddp", None),
    "ddp2": (1, 1, 2, False, "ddp", None),
    "zero1": (1, 1, None, False, "zero1", None),
    "fsdp": (1, 1, None, False, "fsdp", None),
    "fsdp2": (1, 1, 2, False, "fsdp", None),
    "hsdp": (1, 1, None, False, "hsdp", 2),
    "tp2": (2, 1, None, False, "zero1", None),
    "tp2_sp": (2, 1, None, True, "zero1", None),
    "pp2": (1, 2, None, False, "zero1", None),
    "tp2_pp2": (2, 2, None, False, "zero1", None),
    "tp4_pp2": (4, 2, None, False, "zero1", None),
    "tp8_pp4": (8, 4, None, False, "zero1", None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_presets(name):
    p = composed(f"parallelism={name}").parallelism
    assert (p.name, p.tp, p.pp, p.dp, p.sp, p.strategy, p.shard_size) == (name, *LAYOUTS[name])


def test_every_choice_composes_and_is_named_after_its_file():
    groups = group_options(QWEN3)
    for i in range(max(map(len, groups.values()))):
        choices = {group: options[i % len(options)] for group, options in groups.items()}
        run = composed(*(f"{group}={option}" for group, option in choices.items()))
        assert {group: getattr(run, group).name for group in groups} == choices


def test_a_tenth_of_the_run_warms_up_unless_told_otherwise():
    assert composed("schedule.steps=70").schedule.warmup_steps == 7
    assert composed("schedule.steps=5").schedule.warmup_steps == 0
    assert composed("schedule=wsd", "schedule.steps=70", "schedule.warmup_steps=3").schedule.warmup_steps == 3


def test_forward_computes_in_fp32_unless_told_otherwise():
    run = composed("job=forward")
    assert isinstance(run.job, ForwardJob) and run.precision.name == "fp32"
    assert composed("job=forward", "precision=bf16").precision.name == "bf16"


def test_values_of_every_kind():
    run = composed(
        "optim.lr=1e-4",
        "optim.betas=[0.8,0.99]",
        "precision.compile=true",
        "++parallelism.dp=null",
        "model.rope_scaling={rope_type: yarn, factor: 4.0}",
        "optim.lr=2e-4",
        "parallelism='tp2'",
    )
    assert run.optim.lr == 2e-4 and run.optim.betas == (0.8, 0.99)
    assert run.precision.compile is True and run.parallelism.dp is None and run.parallelism.tp == 2
    assert run.model.rope_scaling == {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("import ", "import "),
        ("def f(x): # {1, 2", "def f(x): # {1, 2"),
        ("a, b", "a, b"),
        ("${HOME} and \\${x}", "${HOME} and \\${x}"),
        ("'quoted, text'", "quoted, text"),
        ('"', '"'),
        ("''", ""),
        ("'", "'"),
        ("it's", "it's"),
        ("'a' and 'b'", "'a' and 'b'"),
        ("12", "12"),
        ("x=y", "x=y"),
        ("ünï 你好", "ünï 你好"),
        ("null", None),
    ],
)
def test_text_needs_no_quotes_and_survives_the_frozen_file(typed, value, tmp_path):
    run = composed(f"prompt={typed}")
    assert run.prompt == value
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    assert load_run(tmp_path / "config.yaml") == run


BAD = {
    "lr=1e-4": ["lr", "no such key", "did you mean optim.lr"],
    "tp=4": ["did you mean parallelism.tp?"],
    "optim.steps=4": ["did you mean schedule.steps"],
    "optim.learning_rate=3": ["did you mean optim.lr?"],
    "optin.lr=3": ["did you mean optim.lr?"],
    "data.batch_size=3": ["data.global_batch_size"],
    "model.hiden_size=3": ["did you mean model.hidden_size"],
    "paralelism=tp2": ["did you mean parallelism"],
    "qqqqqqq=1": ["no such key", "--help"],
    "+foo.bar=1": ["foo.bar", "no such key"],
    "model.rope_scaling.factor=2": ["did you mean model.rope_scaling"],
    "job.max_new_tokens=3": ["job.max_new_tokens", "belongs to job=sample", "this is job=train"],
    "model=8B": ["did you mean 8b?", "the choices are"],
    "model=": ["model=", "the choices are"],
    "parallelism=tp2pp2": ["did you mean tp2_pp2"],
    "data=json": ["did you mean jsonl?"],
    "model=tiny,8b": ["--multirun"],
    "optim.lr=1,2": ["--multirun"],
    "optim.lr=range(1,3)": ["--multirun"],
    "optim.lr=abc": ["optim.lr=abc", "must be a number"],
    "optim.lr=null": ["must be a number"],
    "schedule.steps=2.5": ["must be a whole number"],
    "parallelism.dp=x": ["must be a whole number or null"],
    "parallelism.tp=true": ["must be a whole number"],
    "grad=maybe": ["must be true or false"],
    "optim.betas=3": ["must be a list"],
    "optim.betas=[a,b]": ["must be a list"],
    "model.rope_scaling=3": ["must be a mapping"],
    "optim={lr: 1}": ["no such choice"],
    "model.name=8b": ["write model=8b"],
    "family=llama": ["fixed"],
    "schema_version=2": ["fixed"],
    "~optim": ["none can be removed", "optim=adamw"],
    "~model.weights": ["model.weights=null"],
    "~optim.lr": ["none can be removed", "leave it out", "0.003"],
    "~optim.lrr": ["optim.lrr is none", "did you mean optim.lr"],
    "optim.lr": ["write key=value"],
    "=3": ["write key=value"],
    "optim.lr=(": ["cannot read"],
    "hydra.run.dir=x": ["no such key"],
    "parallelism@x=tp2": ["no such key"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_mistake_is_one_line_that_says_what_would_be_right(override):
    with pytest.raises(UserError) as error:
        composed(override)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert [word for word in BAD[override] if word not in text] == []


@pytest.mark.parametrize(
    ("override", "end"),
    [
        ("schedule.steps=1e3", "must be a whole number; write 1000"),
        ("data.seq_len=20.0", "must be a whole number; write 20"),
        ("seed=-1.5E1", "must be a whole number; write -15"),
        ("data.vocab_size=1_2.5e1", "must be a whole number or null; write 125"),
        ("profile.steps=[1e0, 2.0,3]", "or null; write [1,2,3]"),
        ("model.num_hidden_layers=25e-1", "must be a whole number"),
        ("faults.max_skips=1e400", "must be a whole number"),
        ("data.workers=nan", "must be a whole number"),
        ("debug.steps=[1e0,2.5]", "or null"),
    ],
)
def test_a_whole_number_in_another_notation_is_written_out(override, end):
    with pytest.raises(UserError) as error:
        composed(override)
    assert str(error.value).startswith(f"{override}: ") and str(error.value).endswith(end)


def test_all_mistakes_are_listed_at_once():
    with pytest.raises(UserError) as error:
        composed("model=8B", "lr=1", "optim.eps=x", "data.seq_len=0", "foo", "backend=x", "logger.wandb=true", "~seed")
    wrong = ("model=8B", "lr:", "optim.eps=x", "'foo'", "data.seq_len=0", "backend=x", "logger.wandb=true", "'~seed'")
    lines = str(error.value).splitlines()
    assert len(lines) == len(wrong) and all(any(line.startswith(word) for line in lines) for word in wrong)


def test_frozen_file_round_trip_and_its_errors(tmp_path):
    run = composed(
        "model=8b", "job=sample", "optim.betas=[0.5,0.6]", "model.rope_scaling={rope_type: linear, factor: 2}"
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run))
    assert load_run(path) == run and type(load_run(path)) is type(run)

    good = path.read_text()
    for old, new, words in [
        ("schema_version: 1", f"schema_version: {SCHEMA_VERSION + 1}", ["schema version", "update"]),
        ("schema_version: 1", "schema_version: x", ["not the frozen config"]),
        ("schema_version: 1", "", ["not the frozen config"]),
        ("seq_len: 128", "seq_len: long", ["seq_len"]),
        ("seq_len: 128", "seq_length: 128", ["seq_length"]),
        ("name: sample", "name: dance", ["dance", "train"]),
        ("family: qwen3", "family: qwen0", ["qwen0"]),
        (good, "[1, 2]", ["not the frozen config"]),
        (good, "a: [", ["YAML"]),
    ]:
        path.write_text(good.replace(old, new, 1))
        with pytest.raises(UserError) as error:
            load_run(path)
        assert all(word in str(error.value) for word in [str(path), *words]), (new, str(error.value))
    with pytest.raises(UserError, match="no such file"):
        load_run(tmp_path / "absent.yaml")


def test_nothing_is_written_and_no_plugin_of_others_is_loaded(tmp_path):
    """A Hydra plugin on the path must not even be imported, and composing leaves the working directory empty."""
    plugin = tmp_path / "path" / "hydra_plugins" / "loud"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("raise SystemExit('a third-party plugin was loaded')")
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from engine.cli import prepare\n"
        "run = prepare('qwen3', ['hardware=cpu'])\n"
        "assert run.model.name == 'tiny' and not {'torch', 'transformers', 'hydra_plugins.loud'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path / "path")], cwd=empty, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(empty.iterdir()) == []


def test_settings_tuned_for_a_hardware_apply_where_it_is_found(tmp_path, monkeypatch):
    """tune/<hardware>.yaml wins over the recipe; the command line and a job's own needs win over tune/."""
    family = tmp_path / "qwen3"
    shutil.copytree(family_folder(QWEN3), family)
    (family / "tune").mkdir()
    (family / "tune" / "cpu.yaml").write_text(
        "# @package _global_\ndefaults: [override /precision: bf16]\ndata: {seq_len: 32}\n"
    )
    for module in ("engine.compose", "engine.plan"):
        monkeypatch.setattr(f"{module}.family_folder", lambda _: family)
    _compose_groups.cache_clear()
    monkeypatch.setattr("hardware.registry.PLUGINS", {"cpu": "hardware.cpu:Cpu"})
    try:
        run = prepare("qwen3", [])
        assert (run.hardware.name, run.data.seq_len, run.precision.name) == ("cpu", 32, "bf16")
        run = prepare("qwen3", ["data.seq_len=64", "precision=fp32", "hardware=cpu"])
        assert (run.data.seq_len, run.precision.name) == (64, "fp32")
        assert prepare("qwen3", ["job=prepare"]).data.seq_len == 32
        assert composed("job=forward", "hardware=cpu").precision.name == "fp32"
    finally:
        _compose_groups.cache_clear()
