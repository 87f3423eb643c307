"""Demonstrations of a run: the global order, any number of ranks, the split by episode, mixtures and bad samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.check import check_paths
from engine.data.lerobot.loader import PolicyData, build_policy_data
from engine.data.lerobot.request import Request
from engine.data.order import epoch_order
from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.schema import Data, Run
from tests.unit.data_corpora import write_jsonl
from tests.unit.robot_sets import CAMERAS, TASKS, Made, make

HORIZON = 3
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("robot") / "set", lengths=(5, 1, 9, 4, 6, 3))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("robot") / "other", "v2.1", lengths=(4, 7), seed=9)


def run_over(folder: Path, path: Path | str | None, seed: int = 5, name: str = "lerobot", **data: Any) -> Run:
    defaults = {"held_out": 0.0, "global_batch_size": 4, "micro_batch_size": 1, "workers": 2}
    settings = Data(name=name, path=None if path is None else str(path), **(defaults | data))
    model = SimpleNamespace(vocab_size=1)
    return Run(family="none", output_dir=str(folder / "out"), seed=seed, data=settings, model=model)


def opened(run: Run, rank: int = 0, ranks: int = 1, **more: Any) -> PolicyData:
    request = more.pop("request", Request(HORIZON))
    return build_policy_data(run, rank, ranks, request, log=lambda line: None, **more)


def samples(run: Run, steps: int, ranks: int = 1, **more: Any) -> list[PolicyBatch]:
    """The micro-batches of the first steps, in the global order, over all ranks."""
    modules = [opened(run, rank, ranks, **more) for rank in range(ranks)]
    found = [batch for _ in range(steps) for module in modules for batch in module.train.next_step()]
    for module in modules:
        module.close()
    return found


def same(a: PolicyBatch, b: PolicyBatch) -> None:
    assert (a.sample_ids, a.sources, a.tasks) == (b.sample_ids, b.sources, b.tasks)
    for name in ("state", "actions", "action_pad"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert a.images.keys() == b.images.keys()
    assert all(torch.equal(a.images[camera], b.images[camera]) for camera in a.images)


def test_samples_are_those_of_the_seeded_order(tmp_path: Path, made: Made):
    places = [(e, i) for e, one in enumerate(made.arrays) for i in range(len(one["action"]))]
    order = np.concatenate([epoch_order(np.arange(len(places)), 5, epoch) for epoch in range(2)])
    found = samples(run_over(tmp_path, made.folder), 10)
    assert [batch.sample_ids for batch in found] == [[n] for n in range(40)]
    for batch, place in zip(found, order.tolist(), strict=False):
        episode, frame = places[place]
        one, last = made.arrays[episode], len(made.arrays[episode]["action"]) - 1
        assert batch.tasks == [TASKS[episode % 2]] and batch.num_items == 1
        np.testing.assert_array_equal(batch.state[0].numpy(), one["observation.state"][frame])
        wanted = one["action"][np.minimum(frame + np.arange(HORIZON), last)]
        np.testing.assert_array_equal(batch.actions[0].numpy(), wanted)
        assert batch.action_pad[0].tolist() == [frame + step > last for step in range(HORIZON)]
        for camera in CAMERAS:
            assert batch.images[camera].dtype == torch.uint8 and batch.image_masks[camera].all()
            np.testing.assert_array_equal(batch.images[camera][0].numpy(), made.frames[camera][episode][frame])


def test_any_number_of_ranks_and_a_resume_see_the_same_samples(tmp_path: Path, made: Made):
    run = run_over(tmp_path, made.folder, held_out=0.3)
    whole = samples(run, 10)
    for a, b in zip(whole, samples(run, 10, ranks=4), strict=True):
        same(a, b)
    first = opened(run)
    state = first.train.state(6)
    first.close()
    for a, b in zip(whole[24:], samples(run, 4, ranks=2, state=state), strict=True):
        same(a, b)
    with pytest.raises(UserError, match="seed=5, and this run has 6"):
        opened(run_over(tmp_path, made.folder, held_out=0.3, seed=6), state=state)


def test_episodes_are_on_one_side_of_the_split(tmp_path: Path, made: Made):
    run = run_over(tmp_path, made.folder, held_out=0.3, micro_batch_size=2)
    module = opened(run)
    one = module.demonstrations[0]
    train, held = one.side(held_out=False), one.side(held_out=True)
    episode = one.datasets[0].episode_of
    assert not {episode(n) for n in train} & {episode(n) for n in held} and len(train) + len(held) == len(one)
    assert len(train) and len(held)
    batches = module.held_out.batches(1000)
    seen = [batch for batch in batches if batch.num_items]
    assert sum(batch.num_items for batch in seen) == len(held)
    states = np.concatenate([a["observation.state"] for a in made.arrays])
    got = np.concatenate([batch.state.numpy()[: batch.num_items] for batch in seen])
    np.testing.assert_array_equal(got, states[held])
    parts = [opened(run, rank, 2) for rank in range(2)]
    shared = [part.held_out.batches(3) for part in parts]
    assert [len(part) for part in shared] == [1, 1]
    assert [n for part in shared for batch in part for n in batch.sample_ids] == [0, 1, 2, -1]
    for part in (module, *parts):
        part.close()


def test_a_mixture_by_weight_with_statistics_of_the_union(tmp_path: Path, made: Made, other: Made):
    mixture = [
        {"name": "big", "kind": "lerobot", "path": str(made.folder), "weight": 3},
        {"name": "small", "kind": "lerobot", "path": str(other.folder), "weight": 1},
    ]
    run = run_over(tmp_path, None, name="mixture", mixture=mixture)
    check_paths(run.data)
    found = samples(run, 20)
    counts = Counter(source for batch in found for source in batch.sources)
    assert counts == {0: 60, 1: 20}
    module = opened(run)
    assert module.rows(20) == {"rows.big": 60, "rows.small": 20} and module.sources == ("big", "small")
    whole = np.concatenate([one["action"] for one in made.arrays + other.arrays]).astype(np.float64)
    np.testing.assert_array_equal(module.statistics["action"].q99, np.quantile(whole, 0.99, axis=0))
    module.close()
    for a, b in zip(found, samples(run, 20, ranks=2), strict=True):
        same(a, b)
    joined = opened(run_over(tmp_path, f"{made.folder},{other.folder}"))
    np.testing.assert_array_equal(joined.statistics["action"].q01, np.quantile(whole, 0.01, axis=0))
    assert len(joined.demonstrations[0]) == len(whole)
    joined.close()


def test_a_video_that_is_cut_off_is_counted_and_its_samples_replaced(tmp_path: Path):
    broken = make(tmp_path / "set", "v2.1", lengths=(6, 6, 6))
    path = broken.folder / f"videos/chunk-000/{TOP}/episode_000001.mp4"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    run = run_over(tmp_path, broken.folder, max_bad_samples=1)
    module = opened(run)
    found = [batch for _ in range(9) for batch in module.train.next_step()]
    assert list(module.bad.seen) == [f"{broken.folder}: episode 1"]
    assert str(path) in module.bad.seen[f"{broken.folder}: episode 1"]
    states = {tuple(row) for row in broken.arrays[1]["observation.state"].tolist()}
    assert not states & {tuple(batch.state[0].tolist()) for batch in found}
    module.close()
    for a, b in zip(found, samples(run, 9, ranks=2), strict=True):
        same(a, b)
    module = opened(run_over(tmp_path, broken.folder))
    with pytest.raises(UserError, match=r"episode 1: .*; mend it, or skip more of them with data.max_bad_samples=1"):
        for _ in range(9):
            module.train.next_step()
    module.close()


def test_what_a_policy_asks_for_and_the_data_lacks(tmp_path: Path, made: Made):
    run = run_over(tmp_path, made.folder)
    with pytest.raises(UserError, match=r"no camera observation.images.tip; did you mean observation.images.top"):
        opened(run, request=Request(HORIZON, ("observation.images.tip",)))
    with pytest.raises(UserError, match=r"no feature observation.joints; .*its numbers: observation.state, action"):
        opened(run, request=Request(HORIZON, state="observation.joints"))
    one = samples(run, 1, request=Request(HORIZON, (TOP,)))
    assert list(one[0].images) == [TOP]
    with pytest.raises(UserError, match=r"data.cameras: .* has no camera x"):
        check_paths(run_over(tmp_path, made.folder, cameras=["x"]).data)
    with pytest.raises(UserError, match=r"data.path: '.*' holds no meta/info.json"):
        check_paths(run_over(tmp_path, tmp_path).data)
    text = {"name": "text", "kind": "jsonl", "path": str(write_jsonl(tmp_path / "t.jsonl", ["a"]))}
    robot = {"name": "robot", "kind": "lerobot", "path": str(made.folder)}
    with pytest.raises(UserError, match="cannot be mixed with jsonl"):
        check_paths(run_over(tmp_path, None, name="mixture", mixture=[text, robot]).data)
