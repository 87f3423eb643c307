"""The training loss of each source of a mixture, against the reference's loss over that source's rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.data.loader import build_data
from engine.family import load_dotted
from engine.freeze import load_run
from tests import harness
from tests.freezing import freeze
from tests.parity import inspect_steps
from tests.parity.test_training import FIRST, TRAINING
from tests.ranks import Ranks

BF16 = "native-single-bf16"
QUICK = ("native-ddp2", BF16, "megatron-cp2")
LAYOUTS = (*QUICK, "native-single", "native-fsdp2", "megatron-single", "megatron-tp2_pp2")
PARAMETERS = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of one long document each, so that every row is a part of one."""
    root = tmp_path_factory.mktemp("sources")
    for name, words in (("song", "green bottles on wall"), ("list", "; item: value, ")):
        (root / name).mkdir()
        (root / name / "a.txt").write_text(" ".join(f"{k % 7} {words} {k % 13} {k * k % 31}." for k in range(2000)))
    return root


def expected(config: Path) -> dict[str, float]:
    """By the reference, of the first step."""
    run = load_run(config)
    data = build_data(run, 0, 1, log=lambda _: None)
    batches, names = data.train.next_step(), data.sources
    data.close()
    model = load_dotted(FIRST.card.reference).from_pretrained(run.model.weights).float().eval()
    sums: dict[str, list[float]] = {name: [] for name in names}
    with torch.no_grad():
        for batch in batches:
            assert batch.dense
            for row, source in enumerate(batch.sources):
                logits = model(input_ids=batch.tokens_BS[row : row + 1]).logits[0]
                sums[names[source]] += cross_entropy(logits, batch.labels_BS[row], reduction="none").tolist()
    return {f"loss.{name}": sum(losses) / len(losses) for name, losses in sums.items()}


@pytest.mark.parametrize("layout", PARAMETERS)
def test_each_source_has_the_loss_of_its_rows(ranks: Ranks, root: Path, layout: str) -> None:
    backend, world, overrides = harness.LAYOUTS[layout.removesuffix("-bf16")]
    mixture = ", ".join(
        f"{{name: {n}, kind: text, path: {root / n}, weight: {w}}}" for n, w in (("song", 3), ("list", 1))
    )
    words = [w for w in TRAINING if not w.startswith(("data=", "data.held_out", "schedule.", "data.global"))]
    config = freeze(
        root / layout,
        FIRST.family,
        *words,
        "data=mixture",
        f"data.mixture=[{mixture}]",
        "data.held_out=0",
        "data.global_batch_size=16",
        f"model.weights={harness.weights_directory(FIRST, root)}",
        f"backend={backend}",
        f"precision={'bf16' if layout == BF16 else 'fp32'}",
        *overrides,
    )
    wanted = expected(config)
    assert len(wanted) == 2 and abs(wanted["loss.song"] - wanted["loss.list"]) > 1e-3
    for metrics in ranks.call(inspect_steps.first_step, world, config=str(config)):
        for name, loss in wanted.items():
            assert metrics[name] == pytest.approx(loss, rel=5e-3 if layout == BF16 else 1e-5), name
