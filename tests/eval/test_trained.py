"""A policy directory that acts (Pi0.5 with random weights): job=eval, job=serve, seeds, shards and batches."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import UserError
from engine.policy.conventions import parse
from eval.client import Client
from eval.policies.trained import Trained, filled
from eval.policy import Request
from eval.results import merge, outcome, read_lines
from eval.runner import evaluate
from eval.settings import EvalSettings
from eval.toy import protocol as toy
from tests.eval import tiny_policy

REPO = Path(__file__).parent.parent.parent
BENCHMARK = toy.conventions(toy.PRESETS["openpi"])
PLAYED = {"suite": "toy_reach", "trials": 3, "horizon": 25, "record": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy.write(tmp_path_factory.mktemp("policy") / "hf", BENCHMARK)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "zoo.pi05", "hardware=cpu", *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPO)}


def lines(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """What happened in each episode, and the digest of all actions that were carried out."""
    return [(outcome(line), line["actions"]) for _, line in sorted(read_lines(folder).items())]


def play(folder: Path, into: Path, **values: object) -> Path:
    evaluate(EvalSettings(benchmark="toy", policy=str(folder), **PLAYED | values), into, lambda _: None)  # type: ignore
    return into


def test_job_eval_in_shards_and_at_once_is_the_same_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    words = [f"eval.{key}={value}" for key, value in PLAYED.items()]
    place = [f"output_dir={tmp_path}", "run_id=whole"]
    done = subprocess.run(
        command("job=eval", "eval=toy", *words, f"model.weights={folder}", *place),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    whole = tmp_path / "pi05" / "whole"
    result = json.loads((whole / "result.json").read_text())
    assert (result["episodes"], result["complete"], result["job"]) == (9, True, "eval")
    assert (whole / "report.html").is_file()
    found = lines(whole)
    assert len({actions for _, actions in found}) == 9  # every episode has noise of its own
    parts = [play(folder, tmp_path / str(n), shard=f"{n}/2", workers=1 + n) for n in range(2)]
    merge(parts, tmp_path / "merged")
    assert lines(tmp_path / "merged") == found
    assert lines(play(folder, tmp_path / "seed", seed=8, tasks=[0])) != found[:3]


def test_larger_batches_play_every_episode(folder: Path, tmp_path: Path) -> None:
    """Four simulators, and one: passes of three rows are filled up. A row's last bits may depend on its place."""
    many = play(folder, tmp_path / "many", workers=4, batch=3, tasks=[1])
    alone = play(folder, tmp_path / "alone", workers=1, batch=3, tasks=[1])
    assert [happened for happened, _ in lines(many)] == [happened for happened, _ in lines(alone)]


def requests(count: int) -> list[Request]:
    random = np.random.default_rng(4)
    return [
        Request(
            {
                "observation/state": random.normal(size=4).astype(np.float32),
                "observation/image": random.integers(0, 256, (32, 32, 3), np.uint8),
                "prompt": f"reach goal {n}",
            },
            seed=n,
        )
        for n in range(count)
    ]


def test_answers_belong_to_their_requests(folder: Path) -> None:
    asked, one = requests(5), Trained(folder)
    answers = one.infer(asked)
    assert [answer.shape for answer in answers] == [(6, 3)] * 5
    for request, answer in zip(asked, answers, strict=True):
        np.testing.assert_array_equal(one.infer([request])[0], answer)
    free = Trained(folder, batch=None).infer(asked)
    np.testing.assert_allclose(np.stack(free), np.stack(answers), rtol=0, atol=1e-4)
    other = one.infer([dataclasses.replace(asked[0], seed=9)])[0]
    assert np.abs(other - answers[0]).max() > 0.01
    assert [(group, count) for group, count in filled([1, 2, 3], 2)] == [([1, 2], 2), ([3, 3], 1)]
    assert list(filled([1, 2, 3], None)) == [([1, 2, 3], 3)]


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("observation/image", None, "'observation/image' must be an image"),
        ("observation/image", np.zeros((4, 4, 3)), "must be an image, uint8"),
        ("observation/state", np.zeros(3), "must be 4 numbers: x, y, goal_x, goal_y"),
        ("observation/state", np.array([0, np.nan, 0, 0]), "not finite"),
        ("prompt", 3, "'prompt' must be text"),
    ],
)
def test_observations_that_it_cannot_use(folder: Path, key: str, value: object, words: str) -> None:
    request = requests(1)[0]
    changed = {k: v for k, v in (request.observation | {key: value}).items() if v is not None}
    with pytest.raises(UserError, match=words):
        Trained(folder).infer([dataclasses.replace(request, observation=changed)])


@pytest.mark.parametrize(
    "words, said",
    [
        (["job=eval", "eval=toy", "model.weights=DIR"], "eval.suite is missing; for example eval.suite="),
        (
            ["job=eval", "eval=toy", "eval.suite=toy_reach"],
            "model.weights is missing; job=eval needs a policy directory",
        ),
        (["job=serve", "model.weights=DIR", "job.host=0.0.0.0"], "set job.token=SECRET"),
        (["job=serve", "model.weights=DIR", "eval.trials=3"], "eval.trials has no effect: only job=eval uses it"),
        (["job=serve", "model.weights=DIR", "data.path=x"], "data.path has no effect"),
        (
            ["job=eval", "eval.suite=libero_goal", "eval.shard=3", "model.weights=DIR"],
            "eval.shard=3: write NUMBER/COUNT",
        ),
        (
            ["job=eval", "eval=toy", "eval.suite=toy_rech", "model.weights=DIR"],
            "eval.suite=toy_rech: toy has toy_reach",
        ),
        (["job=serve", "model.weights=DIR", "parallelism=ddp2"], "job=serve runs one process"),
    ],
)
def test_words_that_cannot_be(folder: Path, words: list[str], said: str) -> None:
    from engine.cli import prepare

    with pytest.raises(UserError) as caught:
        prepare("pi05", ["hardware=cpu", *(word.replace("DIR", str(folder)) for word in words)])
    assert said in str(caught.value)


def test_other_families_do_not_act(folder: Path) -> None:
    from engine.cli import prepare

    with pytest.raises(UserError, match="qwen3 is no family of policies"):
        prepare("qwen3", ["hardware=cpu", "job=serve", "backend=native"])


@pytest.mark.slow
def test_job_serve_declares_its_conventions_and_ends_with_a_signal(folder: Path, tmp_path: Path) -> None:
    words = command("job=serve", f"model.weights={folder}", "job.port=0", f"output_dir={tmp_path}", "run_id=served")
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        line = next(line for line in process.stdout if "is served at" in line)
        with Client(line.split()[-1]) as client:
            declared = parse(client.metadata["conventions"], "the policy")
            assert declared == dataclasses.replace(BENCHMARK, family="pi05", horizon=6, replan=4)
            request = requests(1)[0]
            given = client.actions(request.observation, 3, seed=5, session="s", step=0)
        expected = Trained(folder).infer([dataclasses.replace(request, seed=5)])[0]
        np.testing.assert_array_equal(given, expected)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0
