"""Multi-token prediction: the paper's formulas, in every layout; kept untouched by whoever does not train it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from engine.llm.predictors import MIMO, QWEN
from tests import harness
from tests.freezing import freeze
from tests.parity import mtp_reference
from tests.parity.test_round_trip import raw, there_and_back
from tests.parity.test_training import TRAINING, steps_of, with_songs, with_words
from tests.ranks import Ranks

WEIGHT = 0.3
BY_NAME = {case.name: case for case, _ in harness.discover() if case.family == harness.SPINE}
TIED, UNTIED, EXPERTS = (BY_NAME[name] for name in ("tied_odd_vocabulary", "untied_one_kv_head", "experts"))
DEPTHS = {TIED.name: 2}
# How families publish such layers, and the first case of each.
NAMES = {"deepseek_v3": None, "mimo": MIMO, "qwen3_next": QWEN}
FAMILIES = [next(case for case in harness.quick_cases() if case.family == name) for name in NAMES]
QUICK = (TIED, "megatron-tp2_sp"), (UNTIED, "megatron-pp2"), (EXPERTS, "megatron-ep2_tp2")
DENSE = ("megatron-single", "megatron-tp2", "megatron-tp2_sp", "megatron-pp2", "megatron-cp2", "megatron-pp2_vpp2")
SPARSE = ("megatron-single", "megatron-ep2", "megatron-ep2_tp2", "megatron-ep2_pp2", "megatron-cp2")
ALL = [(case, layout) for case in (TIED, UNTIED) for layout in DENSE] + [(EXPERTS, layout) for layout in SPARSE]
ALL += [(case, layout) for case in FAMILIES for layout in harness.ARCHITECTURE if "megatron" in layout]
ALL = [(case, layout) for case, layout in ALL if harness.possible(case, layout)]


@lru_cache(maxsize=4)
def model_of(case: harness.Case) -> mtp_reference.Model:
    return mtp_reference.build(case, DEPTHS.get(base(case), 1), NAMES.get(case.family))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_songs(tmp_path_factory.mktemp("mtp"))


def directory(case: harness.Case, root: Path, copies: bool = False) -> Path:
    folder = root / f"weights-{case}-{copies}"
    return folder if folder.exists() else mtp_reference.save(model_of(case), folder, copies)


def base(case: harness.Case) -> str:
    return case.name.removesuffix("_trained")


@pytest.mark.parametrize(
    ("case", "layout", "packed"),
    [
        pytest.param(
            *(case, layout, packed),
            id=f"{case}-{layout}-{'packed' if packed else 'rows'}",
            marks=() if (case, layout) in QUICK and packed else pytest.mark.slow,
        )
        for case, layout in ALL
        for packed in (True, False)
    ],
)
def test_the_papers_formulas(ranks: Ranks, root: Path, case: harness.Case, layout: str, packed: bool) -> None:
    model = model_of(case)
    inputs = (harness.packed_inputs if packed else harness.unpacked_inputs)(case.published["vocab_size"])
    got = harness.forward(
        *(ranks, case, layout, inputs, root / f"{case}-{layout}-{packed}"),
        extra=(f"mtp.loss_weight={WEIGHT}", f"model.weights={directory(case, root)}"),
    )
    expected = mtp_reference.expected(model, inputs, WEIGHT)
    got = {name: tensor for name, tensor in got.items() if not name.startswith("experts.")}
    assert set(got) == set(expected)
    assert (got["logits"] - expected["logits"]).abs().max() <= 1e-4
    for name in (name for name in expected if "loss" in name):
        assert got[name].item() == pytest.approx(expected[name].item(), abs=1e-5), name
    limit = harness.gradient_limit(case, 1e-5)
    far = {
        name: error
        for name, wanted in expected.items()
        if name.startswith("grad.") and (error := ((got[name] - wanted).norm() / wanted.norm()).item()) > limit
    }
    assert not far, far


@pytest.mark.slow
def test_without_a_weight_the_model_is_as_if_there_were_no_such_layers(ranks: Ranks, root: Path) -> None:
    inputs = harness.packed_inputs(TIED.published["vocab_size"])
    folder = directory(TIED, root)
    got = harness.forward(
        *(ranks, TIED, "megatron-single", inputs, root / "unused"), extra=(f"model.weights={folder}",)
    )
    assert not [name for name in got if "mtp" in name or "layers.4" in name]
    wanted = mtp_reference.expected(model_of(TIED), inputs, 0.0)
    assert (got["logits"] - wanted["logits"]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(UNTIED, "megatron-pp2", id="megatron-pp2"),
        pytest.param(EXPERTS, "megatron-ep2_tp2", id="experts-megatron-ep2_tp2", marks=pytest.mark.slow),
        pytest.param(TIED, "native-fsdp2", id="native-fsdp2"),
        pytest.param(EXPERTS, "native-single", id="experts-native-single", marks=pytest.mark.slow),
    ],
)
def test_every_byte_survives(ranks: Ranks, case: harness.Case, layout: str, root: Path, tmp_path: Path) -> None:
    """With the copies of embeddings and head that DeepSeek's directories hold."""
    source = directory(case, root, copies=True)
    assert raw(there_and_back(ranks, source, case.family, tmp_path, layout)) == raw(source)


def train(ranks: Ranks, root: Path, name: str, layout: str, case: harness.Case, *extra: str) -> tuple[Path, list[dict]]:
    backend, world, overrides = harness.LAYOUTS[layout]
    steps = ("schedule.steps=4", "checkpoint.save_interval=2", "checkpoint.export_hf=true", "job.sample_tokens=1")
    words = (*TRAINING, *steps, f"data.path={root / 'corpus'}", f"backend={backend}", *overrides, *extra)
    if not any("resume" in word for word in extra):
        words = (*words, f"model.weights={directory(case, root)}")
    config = freeze(root / name, case.family, *words)
    assert ranks.run(config, world) == [0] * world, (config.parent / "result.json").read_text()
    return config.parent, steps_of(config.parent)


@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        pytest.param(with_words(UNTIED), ("megatron-pp2",), id="untied"),
        pytest.param(with_words(EXPERTS), ("megatron-ep2_pp2", "megatron-cp2"), id="experts", marks=pytest.mark.slow),
        pytest.param(with_words(TIED), ("megatron-tp2_pp2", "megatron-dp2"), id="tied", marks=pytest.mark.slow),
    ],
)
def test_every_layout_learns_the_same(ranks: Ranks, root: Path, case: harness.Case, layouts: tuple[str, ...]) -> None:
    """And resumes from another layout's checkpoint."""
    alone, rows = train(ranks, root, f"alone-{case}", "megatron-single", case)
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"]
    for layout in layouts:
        _, mine = train(ranks, root, f"{layout}-{case}", layout, case)
        resume = f"checkpoint.resume={alone / 'checkpoints/step_00000002'}"
        _, rest = train(ranks, root, f"{layout}-{case}-rest", layout, case, resume)
        for key in ("loss", "grad_norm", "mtp_loss"):
            assert [row[key] for row in mine] == pytest.approx([row[key] for row in rows], rel=1e-5), key
            assert [row[key] for row in rest] == pytest.approx([row[key] for row in rows[2:]], rel=1e-5), key


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        pytest.param("native-fsdp2", (), id="native"),
        pytest.param("megatron-pp2", ("mtp.loss_weight=0",), id="megatron", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_learn_is_kept(ranks: Ranks, root: Path, layout: str, extra: tuple[str, ...]) -> None:
    """The others move; and a run that trains them goes on from there."""
    case = with_words(UNTIED)
    before = raw(directory(case, root))
    run_dir, rows = train(ranks, root, f"kept-{layout}", layout, case, *extra)
    assert "mtp_loss" not in rows[0]
    after = raw(run_dir / "hf")
    own = {name for name in before if name.startswith("model.layers.4.")}
    assert len(own) == 15 and all(before[name] == after[name] for name in own)
    assert not any(before[name] == after[name] for name in before if name not in own)
    resume = f"checkpoint.resume={run_dir / 'checkpoints/step_00000002'}"
    # Their moments begin at zero.
    _, rest = train(ranks, root, f"kept-{layout}-on", "megatron-single", case, resume, "mtp.loss_weight=0.1")
    assert rest[-1]["mtp_loss"] < rest[0]["mtp_loss"]
    assert torch.isfinite(torch.tensor([row["grad_norm"] for row in rest])).all()
