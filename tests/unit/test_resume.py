"""What the controller makes of checkpoint.resume: the run's own settings again, and refusals that touch nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.launch
from engine.backends.base import TRAINED, Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card
from engine.checkpoint.config import config_text, to_published
from engine.checkpoint.paths import step_folder
from engine.checkpoint.sharded import save_sharded
from engine.cli import command
from engine.data.identity import data_identity
from engine.errors import UserError
from engine.family import load_dotted, load_family
from engine.plan import Plan, plan
from engine.resume import changed_settings
from engine.rundir import open_folder

SMALL = (
    *("hardware=cpu", "model.vocab_size=300", "model.hidden_size=16", "model.intermediate_size=8"),
    *("model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=8"),
    *("data=text", "data.path=corpus", "data.seq_len=32", "schedule.steps=10", "optim.lr=0.002"),
)


def planned(*words: str) -> Plan:
    return plan("qwen3", list(words))


def save(made: Plan, step: int, **state: Any) -> Path:
    """A checkpoint as a training run of this plan leaves it, all weights zero."""
    run, family = made.run, load_family("qwen3")
    shapes = load_dotted(family.weights)(run.model).published
    slices = [Slice(k, n, s, (0,) * len(s), torch.zeros(s)) for n, s in shapes.items() for k in TRAINED]
    identity = data_identity(run) | {"tokenizer": "x"}
    position = {"version": 1, "row": 0, "window": 0, "epoch": 0, "position": 0, "offset": 0, "identity": identity}
    all_state = {"step": step, "tokens": 1, "optimizer_step": step, "best_val_loss": None, "val_loss": None}
    Path("tok").mkdir(exist_ok=True)
    Path("tok/tokenizer.json").write_text('{"model": {"vocab": {"<|endoftext|>": 0}}}')
    card = Card(
        "qwen3", texts={"config.json": config_text(to_published(family, run.model), "F32")}, tokenizer=Path("tok")
    )
    folder = step_folder(Path(run.output_dir) / "qwen3" / str(run.run_id), step)
    return save_sharded(folder, slices, all_state | {"data": position} | state, Alone(), card)


def finished(*words: str, steps: tuple[int, ...] = (5, 10)) -> Path:
    """The folder of a run that has ended."""
    made = planned(*words)
    folder = open_folder(made.run, "x", words=made.words)
    os.close(folder.lock)
    for step in steps:
        save(made, step)
    (folder.path / "result.json").write_text('{"status": "done"}')
    return folder.path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    for name in "abc":
        Path(f"corpus/{name}.txt").write_text(f"{name} text " * 20)
    return finished(*SMALL, "run_id=one")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_not_named_comes_from_the_run(run: Path) -> None:
    first = planned(*SMALL, "run_id=one").run
    on = planned(f"checkpoint.resume={run}", "schedule.steps=20")
    assert on.run.checkpoint.resume == str((run / "checkpoints" / "step_00000010").resolve())
    assert (on.run.run_id, on.run.data, on.run.optim, on.run.schedule.steps) == ("one", first.data, first.optim, 20)
    assert on.run.model == first.model and not on.finished and on.place is None
    assert any("overrides.json" in note for note in on.notes)
    assert list(on.words) == [w for w in SMALL if w != "schedule.steps=10"] + ["schedule.steps=20"]
    by_id = planned("run_id=one", "checkpoint.resume=auto", "schedule.steps=20").run
    assert (by_id.data, by_id.checkpoint.resume) == (first.data, on.run.checkpoint.resume)
    before = planned(f"checkpoint.resume={run}/checkpoints/step_00000005")
    assert before.run.checkpoint.resume.endswith("step_00000005") and before.run.run_id == "one"


def test_steps_to_look_at_that_are_over_are_refused_where_they_are_named_anew(run: Path) -> None:
    for words in (("profile=true", "profile.steps=[3,10]"), ("debug.dump=layers", "debug.steps=[10]")):
        with pytest.raises(UserError, match=r"\.steps=.*the run goes on after step 10.*name steps from 11 on"):
            planned(f"checkpoint.resume={run}", "schedule.steps=20", *words)
    planned(f"checkpoint.resume={run}", "schedule.steps=20", "profile=true", "profile.steps=[3,11]")
    looked = finished(*SMALL, "run_id=looked", "profile=true", "profile.steps=[3]")
    planned(f"checkpoint.resume={looked}", "schedule.steps=20")  # of the run's first command


def test_a_group_named_anew_drops_the_runs_values_in_it(run: Path) -> None:
    on = planned(f"checkpoint.resume={run}", "optim=adamw", "schedule.steps=20")
    recipe = planned("hardware=cpu").run.optim
    assert on.run.optim == recipe and recipe.lr != 0.002
    assert f"optim.lr is {recipe.lr}; the run that goes on had 0.002" in on.notes
    assert "optim.lr=0.002" not in on.words and "optim=adamw" in on.words


def test_a_branch_goes_into_a_folder_of_its_own(run: Path) -> None:
    branch = planned(f"checkpoint.resume={run}/checkpoints/step_00000005", "run_id=two", "optim.lr=0.1").run
    assert (branch.run_id, branch.output_dir, branch.data.path) == ("two", "outputs", "corpus")
    assert branch.checkpoint.resume.endswith("one/checkpoints/step_00000005")


def test_another_layout_finds_its_own_number_of_ranks(run: Path) -> None:
    two = finished(*SMALL, "run_id=two", "parallelism=dp2", "launcher.nproc_per_node=2")
    assert planned(f"checkpoint.resume={two}").run.launcher.nproc_per_node == 2
    on = planned(f"checkpoint.resume={two}", "parallelism=single", "schedule.steps=20").run
    assert (on.launcher.nproc_per_node, on.parallelism.dp) == (1, 1)


@pytest.mark.parametrize("place", ["elsewhere/qwen3/one", "qwen3/renamed", "backup"])
def test_a_moved_run_goes_on_where_it_is(run: Path, place: str) -> None:
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(run, place)
    on = planned(f"checkpoint.resume={place}", "schedule.steps=20")
    folder = open_folder(on.run, "y", on.resuming, on.words, on.place)
    os.close(folder.lock)
    assert folder.path.resolve() == Path(place).resolve() and folder.created == ()
    assert (Path(place) / "command.txt").read_text() == "x\ny\n"
    assert (Path(place).parent / "latest").exists() == (Path(place).parent.name == "qwen3")


def test_the_original_weights_need_not_be_there(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_00000010", "weights")
    two = finished(*SMALL[7:], "hardware=cpu", "run_id=two", "model.weights=weights")
    shutil.rmtree("weights")
    on = planned(f"checkpoint.resume={two}", "schedule.steps=20").run
    assert on.model.hidden_size == 16 and on.model.weights == str(Path("weights").resolve())
    # The same command again, as a job script says it.
    planned(*SMALL[7:], "hardware=cpu", "run_id=two", "model.weights=weights", "checkpoint.resume=auto")
    for words in (["model.weights=other"], ["data.tokenizer=other"]):
        Path("other").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=f"{words[0]}: checkpoint.resume goes on with"):
            planned(f"checkpoint.resume={two}", *words)
    planned(f"checkpoint.resume={two}", "data.tokenizer=tok")  # the same files


def test_nothing_left_to_train(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert command("qwen3", [f"checkpoint.resume={run}"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("nothing left to train: ") and said.out.count("\n") == 1 and said.err == ""
    assert contents(run) == before
    # An export that did not come to its end is taken up again.
    (run / "result.json").write_text('{"status": "failed"}')
    assert not planned(f"checkpoint.resume={run}").finished


def break_state(checkpoint: Path, **values: Any) -> None:
    """As an older program would have written it: without checksums."""
    index = json.loads((checkpoint / "index.json").read_text())
    del index["crc32"], index["small"]
    (checkpoint / "index.json").write_text(json.dumps(index))
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | values))


BROKEN = {
    "a shard cut short": lambda c: os.truncate(c / "rank_00000_0.safetensors", 4000),
    "a header destroyed": lambda c: (c / "rank_00000_0.safetensors").write_bytes(
        b"\xff" * (c / "rank_00000_0.safetensors").stat().st_size
    ),
    "an index destroyed": lambda c: (c / "index.json").write_text('{"schema_version": 1, "family": 3}'),
    "no tokenizer": lambda c: shutil.rmtree(c / "tokenizer"),
    "no config": lambda c: (c / "config.json").unlink(),
    "state of other types": lambda c: break_state(c, step="x", tokens=1.5, data=[]),
    "state without a step": lambda c: break_state(c, step=None),
    "another step": lambda c: break_state(c, step=9),
    "a place in the data": lambda c: break_state(c, data={"identity": {}, "row": -1}),
    "state that is a list": lambda c: (c / "state.json").write_text("[]"),
    "corpus": lambda c: Path("corpus/d.txt").write_text("more text"),
    "corpus gone": lambda c: shutil.rmtree("corpus"),
    "words": lambda c: (c.parent.parent / "overrides.json").write_text("[1]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_refusal_is_one_line_and_loses_nothing(
    run: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BROKEN[case](run / "checkpoints" / "step_00000010")
    before = contents(Path.cwd())
    monkeypatch.setattr(engine.launch, "launch", lambda *_: pytest.fail("started"))
    from engine.cli import guarded

    assert guarded(lambda: command("qwen3", [f"checkpoint.resume={run}", "schedule.steps=20"])) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and len(said.splitlines()) == 1, said
    assert "Traceback" not in said and "None" not in said.replace("step is None", "")
    assert contents(Path.cwd()) == before


def test_all_that_differs_is_said_at_once(run: Path) -> None:
    words = ["seed=7", "data.seq_len=64", "data.global_batch_size=4", "model.hidden_size=32", "schedule.steps=5"]
    with pytest.raises(UserError) as error:
        planned(f"checkpoint.resume={run}", *words)
    expected = (
        "seed=1234, and this run has 7",
        "data.seq_len=32",
        "data.global_batch_size=",
        "hidden_size=32 against 16",
    )
    assert [e for e in (*expected, "step 10 and schedule.steps=5") if e not in str(error.value)] == []
    with pytest.raises(UserError, match=r"data\.name=text, and this run has stdlib"):
        planned(f"checkpoint.resume={run}", "data=stdlib")


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_run_that_fails_before_a_step_keeps_its_result(
    run: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)
    monkeypatch.setattr(engine.launch, "launch", lambda *_: status)
    assert command("qwen3", [f"checkpoint.resume={run}", "schedule.steps=20"]) == status
    assert contents(run) == before | {str(run / ".lock"): contents(run)[str(run / ".lock")]}


def test_weights_alone_are_no_training(run: Path) -> None:
    index = run / "checkpoints" / "step_00000010"
    save_sharded(Path("only"), [Slice("param", "w", (1,), (0,), torch.zeros(1))], {"step": 0, "from": "x"}, Alone())
    with pytest.raises(UserError, match=r"model\.weights=.*takes them"):
        planned("checkpoint.resume=only", "run_id=new")
    assert index.is_dir()
    shutil.copytree(index, "alone")
    with pytest.raises(UserError, match="name the new run with run_id"):
        planned("checkpoint.resume=alone")
    assert planned(*SMALL, "checkpoint.resume=alone", "run_id=new", "schedule.steps=11").run.run_id == "new"


def test_before_the_first_save_the_settings_are_taken_up_too(run: Path) -> None:
    two = finished(*SMALL, "run_id=two", steps=())
    on = planned("run_id=two", "checkpoint.resume=auto")
    assert on.run.checkpoint.resume is None and on.run.data.seq_len == 32 and on.resuming and two.is_dir()
    assert planned("run_id=three", "checkpoint.resume=auto").run.data.seq_len != 32


def test_resuming_with_other_numbers_is_noted() -> None:
    """Optimizer, schedule and precision may change on resume, never silently."""
    before = planned("hardware=cpu", "optim.lr=0.001", "optim.weight_decay=0").run
    now = planned("hardware=cpu", "schedule.steps=900", "schedule.warmup_steps=64").run
    notes = changed_settings(now, before)
    assert sorted(note.split(" ")[0] for note in notes) == ["optim.lr", "optim.weight_decay"]
    assert "optim.lr is 0.003; the run that goes on had 0.001" in notes
