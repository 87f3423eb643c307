"""Evaluations of the toy: shards, resumed runs, killed simulators, refused conventions, and bad words."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.errors import UserError
from engine.policy.conventions import Gripper
from eval.interval import wilson
from eval.policy import Request
from eval.results import merge, outcome, read_lines
from eval.runner import evaluate
from eval.settings import EvalSettings, read
from eval.toy import protocol as toy

REPO = Path(__file__).parent.parent.parent
BENCHMARK = toy.conventions(toy.PRESETS["openpi"])


class Reach:
    """Walks to the goal, with noise from the request's seed; fails on task 2, where it walks away."""

    name, needs = "reach", ()

    def __init__(self, cameras: bool = False, meanwhile: Callable[[Request], None] = lambda _: None) -> None:
        seen = BENCHMARK.cameras if cameras else ()
        self.conventions = dataclasses.replace(BENCHMARK, cameras=seen, horizon=4, replan=3)
        self.meanwhile = meanwhile

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> np.ndarray:
        self.meanwhile(request)
        state = request.observation["observation/state"]
        away = -1 if request.observation["prompt"] == "reach goal 2" else 1
        noise = np.random.default_rng(request.seed).normal(size=(4, 3)) * 0.2
        return np.append(away * (state[2:] - state[:2]) * 5, 0) + noise

    def forget(self, session: str) -> None:
        pass


def settings(**values: object) -> EvalSettings:
    return EvalSettings(
        **{"benchmark": "toy", "suite": "toy_reach", "policy": "zero", "trials": 4, "workers": 2} | values
    )  # type: ignore[arg-type]


def run(folder: Path, policy: Reach | None = None, **values: object) -> dict[str, object]:
    return evaluate(settings(**values), folder, lambda _: None, policy=policy or Reach())


def outcomes(folder: Path) -> list[dict[str, object]]:
    return [outcome(line) for _, line in sorted(read_lines(folder).items())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    summary = run(folder, Reach(cameras=True))
    assert (summary["successes"], summary["episodes"], summary["complete"]) == (8, 12, True)
    assert summary["tasks"]["2"]["rate"] == 0 and summary["reasons"] == {"horizon": 4}
    return folder


def test_two_shards_merged_equal_one_run(whole: Path, tmp_path: Path) -> None:
    """And seeds decide, not the number of workers or what is in a batch."""
    for number in range(2):
        run(tmp_path / str(number), Reach(cameras=True), shard=f"{number}/2", workers=1)
    assert len(outcomes(tmp_path / "0")) == 6
    merged = merge([tmp_path / "0", tmp_path / "1"], tmp_path / "both")
    assert outcomes(tmp_path / "both") == outcomes(whole) and merged["complete"]
    with pytest.raises(UserError, match="already holds"):
        merge([tmp_path / "0"], tmp_path / "both")
    line = json.loads((tmp_path / "1" / "results.jsonl").read_text().splitlines()[0])
    (tmp_path / "1" / "results.jsonl").write_text(json.dumps(line | {"steps": 1}) + "\n")
    with pytest.raises(UserError, match="ended otherwise"):
        merge([tmp_path / "both", tmp_path / "1"], tmp_path / "more")


def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, Reach(cameras=True), seed=8)
    assert outcomes(tmp_path) != outcomes(whole)


def test_failures_have_videos_and_the_report_shows_them(whole: Path) -> None:
    pytest.importorskip("av")
    videos = sorted(path.name for path in (whole / "videos").iterdir())
    assert videos == [f"task2_episode{n}.mp4" for n in range(4)]
    page = (whole / "report.html").read_text()
    assert all(video in page for video in videos) and "reach goal 1" in page and "66.7% (39.1 to 86.2)" in page


def simulators() -> list[psutil.Process]:
    """The workers of this process's runs; other tests may have children of their own here, rank processes above all."""
    return [child for child in psutil.Process().children() if "eval.worker" in child.cmdline()]


def test_a_killed_simulator_is_replaced_and_its_episode_repeated(whole: Path, tmp_path: Path) -> None:
    killed = threading.Event()

    def kill_one(request: Request) -> None:
        if request.session.endswith("1/2") and request.step > 2 and not killed.is_set():
            killed.set()
            simulators()[0].kill()

    summary = run(tmp_path, Reach(cameras=True, meanwhile=kill_one), workers=1)
    assert killed.is_set() and summary["repeated"] == 1
    assert outcomes(tmp_path) == outcomes(whole)


def test_a_simulator_that_always_dies_ends_its_episode_and_is_counted(tmp_path: Path) -> None:
    def kill_all(request: Request) -> None:
        if request.session.endswith("0/1"):
            for child in simulators():
                child.kill()

    summary = run(tmp_path, Reach(meanwhile=kill_all), workers=1, tasks=[0], trials=3, retries=1)
    assert (summary["episodes"], summary["successes"]) == (3, 2)
    (reason,) = summary["reasons"]
    assert reason.startswith("simulator: the simulator's process ended")


def test_a_stalled_simulator_is_replaced(tmp_path: Path) -> None:
    stopped = threading.Event()

    def stop_one(request: Request) -> None:
        if request.step > 0 and not stopped.is_set():
            stopped.set()
            simulators()[0].suspend()

    summary = run(tmp_path, Reach(meanwhile=stop_one), workers=1, tasks=[0], trials=2, stall_s=10.0)
    assert (summary["successes"], summary["repeated"]) == (2, 1)


COMMAND = ["-m", "zoo", "eval", "benchmark=toy", "suite=toy_reach", "policy=zero", "trials=8", "workers=1"]


def test_a_killed_run_goes_on_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, *COMMAND, f"output={tmp_path / 'a'}"]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    lines = tmp_path / "a" / "results.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 2):
        time.sleep(0.002)
    process.kill()
    process.wait()
    before = read_lines(tmp_path / "a")
    with lines.open("a") as file:
        file.write('{"task": 0, "epis')
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "toy_reach: 0.0% (0.0 to 13.8)" in done.stdout
    after = read_lines(tmp_path / "a")
    assert len(after) == 24 and all(after[key] == line for key, line in before.items())


def test_a_folder_of_another_evaluation_is_refused(whole: Path) -> None:
    with pytest.raises(UserError, match=r"different: seed \(7 there, 9 now\)"):
        run(whole, Reach(cameras=True), seed=9)


def declaring(**values: object) -> Reach:
    policy = Reach(cameras=True)
    policy.conventions = dataclasses.replace(policy.conventions, **values)  # type: ignore[arg-type]
    return policy


def flipped() -> tuple[object, ...]:
    return tuple(dataclasses.replace(camera, flip="vertical") for camera in BENCHMARK.cameras)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"cameras": flipped()}, "camera image: the policy knows images flipped 'vertical'"),
        ({"control": "absolute"}, "control: the policy gives absolute actions, the benchmark takes delta ones"),
        ({"embodiment": "widowx"}, "embodiment: the policy is for 'widowx'"),
        (
            {"action": dataclasses.replace(BENCHMARK.action, gripper=Gripper(1, -1))},
            "gripper opens at 1 and closes at -1, and the benchmark's opens at -1",
        ),
        (
            {"action": dataclasses.replace(BENCHMARK.action, rotation="euler_xyz")},
            "action: the policy's rotation is euler_xyz, and the benchmark's is none",
        ),
        ({"state": dataclasses.replace(BENCHMARK.state, names=("x",))}, "state: the policy has 1 numbers"),
    ],
)
def test_wrong_conventions_are_refused_each_in_its_words(wrong: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        run(tmp_path / "a", declaring(**wrong))
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "a").exists()


def test_nan_actions_end_the_run_in_one_line(tmp_path: Path) -> None:
    class Broken(Reach):
        def _one(self, request: Request) -> np.ndarray:
            return np.full((4, 3), np.nan)

    with pytest.raises(UserError, match="the policy says: the policy gave an action that is not finite"):
        run(tmp_path, Broken())


@pytest.mark.parametrize(
    "words, said",
    [
        (["suit=a"], "suit: there is no such setting; did you mean suite?"),
        (["workers=two"], "workers=two: it must be a whole number"),
        (["tasks=a"], "tasks=a: it must be a list"),
        (["policy"], "'policy' is no setting; write key=value"),
    ],
)
def test_words(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        read(EvalSettings, words)
    assert read(EvalSettings, ["tasks=[0,3]", "seed=null"]).tasks == [0, 3]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"suite": None}, "suite is missing"),
        ({"suite": "toy_rech"}, "did you mean toy_reach"),
        ({"benchmark": "liberro"}, "did you mean libero"),
        ({"preset": "nobody"}, "those of toy are openpi"),
        ({"tasks": [3]}, "has the tasks 0 to 2"),
        ({"trials": 51}, "50 initial states"),
        ({"shard": "2/2"}, "write NUMBER/COUNT"),
        ({"policy": None}, "name either policy="),
        ({"server": "ws://127.0.0.1:1"}, "name either policy="),
        ({"record": "some"}, "the choices are failures, all, none"),
        ({"workers": 0}, "workers=0: it must be at least 1"),
    ],
)
def test_values_that_cannot_be(values: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        evaluate(settings(**values), tmp_path)


def test_what_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOOFORGE_EVAL_ENVS", str(tmp_path))
    with pytest.raises(UserError, match="`zoo eval-env libero` builds its environment"):
        evaluate(EvalSettings(suite="libero_object", policy="zero"), tmp_path / "a")


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662), (0, 0, 0, 1)],
)
def test_wilson_intervals(successes: int, trials: int, low: float, high: float) -> None:
    """From Newcombe 1998, table I, and arithmetic."""
    assert wilson(successes, trials) == pytest.approx((low, high), abs=6e-5)
