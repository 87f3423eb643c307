"""Ten AdamW steps on learnable text: a plain loop over the reference model, and every layout of both backends."""

from __future__ import annotations

import json
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.batch import IGNORE, Batch
from engine.data.loader import build_data
from engine.freeze import load_run
from engine.moe.balance import published_aux_loss
from engine.schedule import learning_rate
from engine.schema import Run
from tests import harness
from tests.freezing import freeze
from tests.parity import drops
from tests.ranks import Ranks

STEPS = 10
VOCABULARY = 307  # odd, and enough for a byte-level BPE
TRAINING = (
    f"schedule.steps={STEPS}",
    "precision.tf32=false",
    "schedule.warmup_steps=2",
    "optim.lr=0.003",
    "optim.clip_grad=1.0",
    "data=text",
    f"data.vocab_size={VOCABULARY}",  # the random weights bring no tokenizer
    "data.seq_len=32",
    "data.global_batch_size=8",
    "data.micro_batch_size=2",
    "data.held_out=0.2",
    "job.eval_rows=8",
    "checkpoint.export_hf=false",
    "checkpoint.keep_last=10",
    "checkpoint.save_interval=5",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus: sentences of unequal lengths that can be learnt within ten steps."""
    return with_songs(tmp_path_factory.mktemp("training"))


def with_songs(root: Path) -> Path:
    """The folder, with the corpus in it."""
    corpus = root / "corpus"
    corpus.mkdir()
    for i in range(24):
        words = " ".join(f"{k % 7} green bottles on wall {k % (i + 2)}." for k in range(4 + 5 * (i % 6)))
        (corpus / f"song_{i:02d}.txt").write_text(words)
    return root


def with_words(case: harness.Case) -> harness.Case:
    """The case with a vocabulary that a tokenizer can have."""
    items = tuple((case.published | harness.training(case.family)["keys"] | {"vocab_size": VOCABULARY}).items())
    return harness.Case(case.family, f"{case.name}_trained", items)


CASES = [with_words(case) for case in harness.spine_cases()]
FIRST = CASES[0]


def train(
    ranks: Ranks, root: Path, layout: str, name: str, *extra: str, case: harness.Case = FIRST
) -> tuple[Path, list[dict]]:
    """A training run; its folder and its rows of metrics."""
    config, world = training_config(root, layout, name, *extra, case=case)
    codes = ranks.run(config, world)
    assert codes == [0] * world, (config.parent / "result.json").read_text()
    return config.parent, steps_of(config.parent)


def training_config(root: Path, layout: str, name: str, *extra: str, case: harness.Case) -> tuple[Path, int]:
    """The frozen config of a training run, and its ranks."""
    backend, world, overrides = harness.LAYOUTS[layout]
    weights = harness.weights_directory(case, root)
    config = freeze(
        root / name,
        case.family,
        *TRAINING,
        f"data.path={root / 'corpus'}",
        f"model.weights={weights}",
        f"backend={backend}",
        *overrides,
        *extra,
    )
    return config, world


def steps_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def masks(batch: Batch, config: Any) -> Any:
    """The reference's attention mask; where it has windows, one for each kind of layer."""
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return block_mask(batch)
    return {"full_attention": block_mask(batch), "sliding_attention": block_mask(batch, config.sliding_window)}


def block_mask(batch: Batch, window: int | None = None) -> torch.Tensor:
    """[B, 1, S, S] additive: a token sees itself and earlier tokens of its own document, or of a window of it."""
    rows, length = batch.tokens_BS.shape
    document = (batch.positions_BS == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    causal = causal if window is None else causal.triu(1 - window)
    mask = torch.zeros(rows, 1, length, length)
    return mask.masked_fill(~(same & causal)[:, None], torch.finfo(torch.float32).min)


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[B, S, V]; for each document alone where no mask keeps them apart in the reference: of models with recurrent
    layers, or with indexers.
    """
    if any(hasattr(module, "A_log") or hasattr(module, "indexer") for module in model.modules()):
        pieces = batch.tokens_BS.flatten().split(batch.cu_seqlens.diff().tolist())
        whole = torch.cat([model(input_ids=piece[None], use_cache=False).logits[0] for piece in pieces])
        return whole.unflatten(0, batch.tokens_BS.shape)
    mask = masks(batch, model.config)
    return model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS, attention_mask=mask).logits


def balancing_loss(model: torch.nn.Module, router_logits: list[torch.Tensor]) -> torch.Tensor:
    """The reference's balancing loss of each layer by itself, and their mean."""
    config, function = model.config, sys.modules[type(model).__module__].load_balancing_loss_func
    layers = [function((logits,), config.num_experts, config.num_experts_per_tok) for logits in router_logits]
    return config.router_aux_loss_coef * sum(layers) / len(layers)


@torch.no_grad()
def move_biases(model: torch.nn.Module, loads: dict[str, torch.Tensor], rate: float) -> None:
    """Correction biases after a step: less by `rate` for overloaded experts, more for underloaded ones.

    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2. `loads` are assignments to each expert, by the router's name.
    """
    buffers = harness.published_buffers(model)
    for router, counts in loads.items():
        block = router.rpartition(".")[0] + "."
        for bias in (buffer for name, buffer in buffers.items() if name.startswith(block)):
            mean = counts.sum().item() / counts.numel()
            for expert, load in enumerate(counts.tolist()):
                bias.view(-1)[expert] += rate * ((load < mean) - (load > mean))


@lru_cache(maxsize=8)
def plain_loop(config: Path, case: harness.Case) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a bare loop over the reference class, on the rows that the run reads."""
    return plain_steps(load_run(config), harness.reference(case.card, case.published), case)


def plain_steps(run: Run, model: torch.nn.Module, case: harness.Case) -> tuple[list[float], list[float]]:
    """The same for any model, of which what asks for gradients is trained."""
    heard: list[torch.Tensor] = []
    loads: dict[str, torch.Tensor] = {}

    def hear(name: str, _module: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        heard.append(output[0])
        counts = torch.bincount(output[-1].flatten(), minlength=output[0].shape[-1])
        loads[name] = loads.get(name, 0) + counts

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(partial(hear, name))
    stream = build_data(run, 0, 1).train
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": run.optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(run.optim.betas), eps=run.optim.eps)
    losses, norms = [], []
    for step in range(run.schedule.steps):
        batches = stream.next_step()
        count = sum(batch.num_tokens for batch in batches)
        optimizer.zero_grad()
        loads.clear()
        total = 0.0
        for batch in batches:
            heard.clear()
            logits = logits_of(model, batch)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            learned = loss / count
            if run.model.mixture() and published_aux_loss(run):
                learned = learned + balancing_loss(model, heard) / len(batches)
            learned.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, run.optim.clip_grad).item())
        losses.append(total / count)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.optim.lr, run.schedule)
        optimizer.step()
        if run.task.name != "lora":  # adapters leave a model's own weights, and biases, as they are
            move_biases(model, loads, run.moe.bias_update_rate)
    return losses, norms


# Of families besides the spine: what divides a layer, a row, the layers, the experts, and the other backend's weights.
TRAINED = ("megatron-tp2_sp", "megatron-pp2", "megatron-cp2", "megatron-ep2_tp2", "native-fsdp2")


def cases_and_layouts() -> list:
    return [
        pytest.param(case, layout, id=f"{case}-{layout}", marks=() if quick else pytest.mark.slow)
        for original in harness.quick_cases()
        for case in (with_words(original),)
        for layout in harness.LAYOUTS
        if harness.possible(original, layout) and (case.family == harness.SPINE or layout in TRAINED)
        for quick in (case.family == harness.SPINE and harness.is_quick(original, layout),)
    ]


@pytest.mark.parametrize(("case", "layout"), cases_and_layouts())
def test_ten_steps_equal_a_plain_loop(ranks: Ranks, root: Path, case: harness.Case, layout: str) -> None:
    # Only the spine's reference has the balancing loss of the engine; the others are compared without it.
    ways = ("moe.aux_loss=0",) if case.experts and case.family != harness.SPINE else ()
    run_dir, rows = train(ranks, root, layout, f"{case}-{layout}", *ways, case=case)
    first = root / f"first-{case}"  # any run's config names the same rows; one plain loop serves all layouts
    if not first.exists():
        first.symlink_to(run_dir)
    losses, norms = plain_loop(first / "config.yaml", case)
    assert losses[0] - losses[-1] >= 0.5, "the data must be learnable for the comparison to mean anything"
    tolerance = harness.training(case.family)["tolerance"]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=tolerance)


EXPERTS = next(case for case in CASES if case.experts)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("parallelism.strategy=ddp",), ("parallelism.overlap=true",)], ids=" ".join)
def test_experts_under_other_optimizers(ranks: Ranks, root: Path, ways: tuple[str, ...]) -> None:
    """Whole optimizer states, and reductions during the backward pass: still the plain loop's numbers."""
    run_dir, rows = train(
        ranks, root, "megatron-ep2", f"experts-{ways[0].split('.')[1].replace('=', '-')}", *ways, case=EXPERTS
    )
    losses, norms = plain_loop(run_dir / "config.yaml", EXPERTS)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)


FULL = ("moe.capacity_factor=1.0", "moe.sequence_aux_loss=0.02", "moe.z_loss=0.01", "logger.interval=5")


@pytest.fixture(scope="module")
def full_alone(ranks: Ranks, root: Path) -> tuple[list[dict], list[drops.Decision]]:
    """One process whose experts are full: its rows, and what the experts turned away."""
    return train_full(ranks, root, "megatron-single", "full")


def train_full(
    ranks: Ranks, root: Path, layout: str, name: str, *extra: str, given: list[drops.Decision] | None = None
) -> tuple[list[dict], list[drops.Decision]]:
    """Rows of metrics and the first rank's decisions."""
    config, world = training_config(root, layout, f"{name}-{layout}", *FULL, *extra, case=EXPERTS)
    answers = ranks.call(drops.run, world, config=str(config), given=given)
    assert [code for code, _ in answers] == [0] * world, (config.parent / "result.json").read_text()
    return steps_of(config.parent), answers[0][1]


def assert_same_rows(rows: list[dict], alone: list[dict]) -> None:
    for mine, theirs in zip(rows, alone, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
        for key in ("moe_imbalance", "moe_aux_loss", "moe_sequence_loss", "moe_z_loss"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4)
    assert rows[4]["moe_load"] == alone[4]["moe_load"] and "moe_load" not in rows[3]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron-ep2_tp2", "megatron-ep2_pp2", "megatron-cp2"])
def test_full_experts_and_all_losses_are_alike_in_every_layout(
    ranks: Ranks, root: Path, full_alone: tuple[list[dict], list[drops.Decision]], layout: str
) -> None:
    """What has no reference: capacity, and the losses of rows and of logits, against one process.

    Two assignments may be as likely as each other but for the last bits, and then one layout drops the one and another
    layout the other: two words in like surroundings were seen with 0.3574835 and 0.3574836. So layouts are told what
    one process dropped, and where they would have dropped something else, it was as likely.
    """
    alone, decisions = full_alone
    rows, mine = train_full(ranks, root, layout, "told", given=decisions)
    assert_same_rows(rows, alone)
    told = [min(decisions, key=lambda theirs, own=own: theirs.like(own.probs)) for own in mine]
    assert max(map(drops.margin, mine, told)) < 1e-5
    assert not all((own.kept == own.chosen).all() for own in mine)


@pytest.mark.slow
def test_the_last_are_dropped_whatever_ranks_hold_them(ranks: Ranks, root: Path) -> None:
    """Under context parallelism a rank holds tokens from both ends; places in a micro-batch have no near-ties."""
    alone, _ = train_full(ranks, root, "megatron-single", "position", "moe.drop=position")
    for layout in ("megatron-cp2", "megatron-ep2_tp2"):
        assert_same_rows(train_full(ranks, root, layout, "position", "moe.drop=position")[0], alone)


MOVES = [
    ("megatron-single", "megatron-tp2_pp2"),
    ("megatron-tp2_pp2", "megatron-dp2"),
    ("megatron-dp2", "native-fsdp2"),
    ("native-zero1", "native-single"),
    ("native-hsdp", "megatron-tp2_sp"),
    ("megatron-cp2", "megatron-single"),
    ("megatron-single", "megatron-cp2"),
    ("megatron-pp2_vpp2", "megatron-cp2_tp2"),
]


EXPERT_MOVES = [
    ("megatron-ep2_tp2", "megatron-ep2_pp2"),
    ("megatron-ep2_etp2", "native-fsdp2"),
    ("native-zero1", "megatron-ep2"),
]
ALL_MOVES = [(case, *move) for case in CASES for move in (EXPERT_MOVES if case.experts else MOVES)]


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        pytest.param(*move, id="-".join(map(str, move)), marks=() if index == 0 else pytest.mark.slow)
        for index, move in enumerate(ALL_MOVES)
    ],
)
def test_resume_in_another_layout(ranks: Ranks, root: Path, case: harness.Case, before: str, after: str) -> None:
    name = f"{case}-{before}-to-{after}"
    run_dir, whole = train(ranks, root, before, name, case=case)
    folder = run_dir / "checkpoints" / "step_00000005"
    _, rest = train(ranks, root, after, f"{name}-rest", f"checkpoint.resume={folder}", case=case)
    assert [row["step"] for row in rest] == [6, 7, 8, 9, 10]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rest] == pytest.approx([row[key] for row in whole[5:]], rel=1e-5)
    assert [row["tokens"] for row in rest] == [row["tokens"] for row in whole[5:]]
