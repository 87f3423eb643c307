"""The proof of a family: its reference implementation against `job=forward`, for every family found in the zoo.

A family brings `parity.yaml`, small configurations that hurt; everything else here is the same for all. Expected values
come from the reference class alone: logits, loss and gradients of random weights that it wrote itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.family import Family, load_dotted, load_family
from tests import layouts
from tests.freezing import freeze
from tests.measured import record
from tests.ranks import Ranks

ZOO = Path(__file__).parent.parent / "zoo"

# name -> (backend, ranks, overrides)
LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "megatron-single": ("megatron", 1, ("parallelism=single",)),
    "megatron-dp2": ("megatron", 2, ("parallelism=dp2",)),
    "megatron-tp2": ("megatron", 2, ("parallelism=tp2",)),
    "megatron-tp2_sp": ("megatron", 2, ("parallelism=tp2_sp",)),
    "megatron-pp2": ("megatron", 2, ("parallelism=pp2",)),
    "megatron-tp2_pp2": ("megatron", 4, ("parallelism=tp2_pp2",)),
    "megatron-ep2": ("megatron", 2, ("parallelism=ep2",)),
    "megatron-ep2_tp2": ("megatron", 2, ("parallelism=ep2_tp2",)),
    "megatron-ep2_etp2": ("megatron", 4, ("parallelism=ep2_tp2", "parallelism.etp=2")),
    "megatron-ep2_pp2": ("megatron", 4, ("parallelism=ep2", "parallelism.pp=2")),
    "megatron-cp2": ("megatron", 2, ("parallelism=cp2",)),
    "megatron-cp2_tp2": ("megatron", 4, ("parallelism=cp2_tp2",)),
    "megatron-cp2_pp2": ("megatron", 4, ("parallelism=cp2_pp2",)),
    "megatron-pp2_vpp2": ("megatron", 2, ("parallelism=pp2_vpp2",)),
    "native-single": ("native", 1, ("parallelism=single",)),
    "native-ddp2": ("native", 2, ("parallelism=ddp2",)),
    "native-zero1": ("native", 2, ("parallelism=zero1", "parallelism.dp=2")),
    "native-fsdp2": ("native", 2, ("parallelism=fsdp2",)),
    "native-hsdp": ("native", 4, ("parallelism=hsdp", "parallelism.dp=4", "parallelism.shard_size=2")),
}
# The family on which the engine itself is tried, in every layout. The others prove their architecture in these.
SPINE = "qwen3"
ARCHITECTURE = (
    *("megatron-single", "megatron-tp2_sp", "megatron-pp2", "megatron-ep2", "megatron-cp2", "megatron-ep2_tp2"),
    *("native-single", "native-fsdp2"),
)
# Experts under tensor parallelism need sequence parallelism.
ONLY_DENSE = ("megatron-tp2", "megatron-tp2_pp2")
ONLY_EXPERTS = ("megatron-ep2", "megatron-ep2_tp2", "megatron-ep2_etp2", "megatron-ep2_pp2")
STAGES = {"megatron-pp2_vpp2": 4}  # that must divide the layers
QUICK_EXPERTS = ("megatron-ep2_tp2", "megatron-ep2_pp2", "native-single", "native-fsdp2")
QUICK = ("megatron-tp2_sp", "megatron-tp2_pp2", "native-single", "native-fsdp2")
UNPACKED = ("megatron-tp2_sp", "megatron-ep2_tp2", "native-single")
QUICK_ARCHITECTURE = ("megatron-tp2_sp", "megatron-ep2_tp2", "native-single")


@dataclass(frozen=True)
class Case:
    """One configuration of one family."""

    family: str
    name: str
    config: tuple[tuple[str, Any], ...]  # published keys

    @property
    def published(self) -> dict[str, Any]:
        return dict(self.config)

    @property
    def card(self) -> Family:
        """The family's card for this architecture."""
        return load_family(self.family).of(self.published.get("model_type"))

    @property
    def config_object(self) -> Any:
        """The family's own config of this case."""
        return load_dotted(self.card.config)(**{k: list(v) if isinstance(v, tuple) else v for k, v in self.config})

    @property
    def layers(self) -> int:
        return self.published.get("num_hidden_layers", 0)

    @property
    def experts(self) -> bool:
        """Whether it has experts."""
        return self.config_object.mixture() is not None

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


class Hashed(dict[str, Any]):
    """A published object, such as `rope_scaling`, that can be a part of a cache's key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(sorted(self.items())))


def hashable(value: Any) -> Any:
    """A published value that can be a part of a cache's key."""
    if isinstance(value, list):
        return tuple(value)
    return Hashed(value) if isinstance(value, dict) else value


@cache
def discover() -> list[tuple[Case, bool]]:
    """Every case of every family that brings a parity.yaml, and whether it is the quick one of its architecture."""
    found = []
    for path in sorted(ZOO.glob("*/*/parity.yaml")):
        content = yaml.safe_load(path.read_text())
        seen = set()
        for name, changes in content["cases"].items():
            merged = content["base"] | (changes or {})
            # As hashable values: a case is a key of caches.
            items = tuple((key, hashable(value)) for key, value in merged.items())
            found.append((Case(path.parent.name, name, items), merged.get("model_type") not in seen))
            seen.add(merged.get("model_type"))
    return found


def quick_cases() -> list[Case]:
    """The quick case of each architecture of each family."""
    return [case for case, quick in discover() if quick]


def spine_cases() -> list[Case]:
    """The quick cases of the family on which the engine is tried."""
    return [case for case in quick_cases() if case.family == SPINE]


@cache
def _own(family: str) -> dict[str, Any]:
    """A family's parity.yaml; nothing for one that brings tests of its own instead."""
    path = next(ZOO.glob(f"*/{family}/parity.yaml"), None)
    return yaml.safe_load(path.read_text()) if path else {}


def refused(family: str) -> dict[str, str]:
    """Layouts that a family's architecture does not allow, and what the controller says of them: its `refuses`."""
    return _own(family).get("refuses", {})


def gradient_limit(case: Case, usual: float) -> float:
    """How far a gradient may be off, norm-wise: the `usual`, or what the family says that rounding alone does."""
    return max(usual, _own(case.family).get("gradients", 0.0))


def training(family: str) -> dict[str, Any]:
    """For ten optimizer steps: other published `keys`, the `tolerance` where rounding alone moves a curve more, and
    what is `open`: a difference that is known and not understood.
    """
    return {"keys": {}, "tolerance": 1e-5} | _own(family).get("training", {})


@cache
def possible(case: Case, layout: str) -> bool:
    """Whether a model of this kind is tried in a layout."""
    if case.family != SPINE and (layout not in ARCHITECTURE or layout in refused(case.family)):
        return False
    stages = STAGES.get(layout, 1)
    return layout not in (ONLY_DENSE if case.experts else ONLY_EXPERTS) and not case.layers % stages


def is_quick(case: Case, layout: str) -> bool:
    if case not in quick_cases():
        return False
    if case.family != SPINE:
        return layout in QUICK_ARCHITECTURE
    return layout in (QUICK_EXPERTS if case.experts else QUICK)


def cases_and_layouts(packed: bool) -> list[Any]:
    """pytest parameters (case, layout); all but the quick cases on their quick layouts are marked slow.

    Rows that are one document each are a special case of packed ones: a family's further cases are tried so in few.
    """
    return [
        pytest.param(case, layout, id=f"{case}-{layout}", marks=() if is_quick(case, layout) else pytest.mark.slow)
        for case, first in discover()
        for layout in LAYOUTS
        if possible(case, layout) and (packed or first or layout in UNPACKED)
    ]


def reference(family: Family, published: dict[str, Any], seed: int = 5) -> torch.nn.Module:
    """The reference model in fp32 with random weights that bite: norms and biases too, and matrices large enough."""
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in published.items()}
    own = layouts.LAYOUTS.get(family.model_type)
    keys = own.keys(keys) if own else keys
    config = load_dotted(family.reference_config).from_dict({"model_type": family.model_type} | keys)
    # How transformers saves a model it looks up by this; some families are published under another name than theirs.
    config.model_type = type(config).model_type
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = load_dotted(family.reference)(config).float().eval()
    model.published_layout = own
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that last, so that it shows what they began with
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3 - 4)
            elif name.endswith("conv1d.weight"):  # few inputs
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1 and not name.endswith("bias"):
                middle = float(parameter.any())  # norms that begin with 0 are added to 1
                parameter.copy_(middle - 0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        for buffer in published_buffers(model).values():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def published_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """What a checkpoint stores besides parameters that are learnt, such as the correction biases of routers."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not tensor.requires_grad}


@lru_cache(maxsize=8)
def reference_of(case: Case) -> torch.nn.Module:
    """`reference`, made once for each case."""
    return reference(case.card, case.published)


def weights_directory(case: Case, root: Path) -> Path:
    """What the reference's own save_pretrained writes; in the published layout where that is another one."""
    folder = root / f"weights-{case}"
    if not folder.exists():
        reference_of(case).save_pretrained(folder)
        if own := layouts.LAYOUTS.get(case.card.model_type):
            own.rewrite(folder, case.published)
    return folder


def unpacked_inputs(vocab_size: int) -> dict[str, Tensor]:
    """Three rows (no multiple of two ranks) of an odd length, some labels ignored, one row with one label only."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, vocab_size, (3, 17), generator=generator)
    labels = tokens.clone()
    labels[0, 3:6] = -100
    labels[1, :-1] = -100
    return {"input_ids": tokens, "labels": labels}


DOCUMENTS = ((1, 9, 6, 8), (13, 11))  # lengths of the packed documents of each row; both rows hold 24 tokens


def packed_inputs(vocab_size: int) -> dict[str, Tensor]:
    """Two packed rows; `position_ids` restart with every document, and no label crosses one's end."""
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(0, vocab_size, (len(DOCUMENTS), sum(DOCUMENTS[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    labels = torch.where(positions == 0, torch.full_like(tokens, -100), tokens)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def expected_unpacked(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference's own logits, loss and gradients."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return _collect(model, output.logits, output.loss)


def expected_packed(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference run on every document alone; the loss is the mean over all supervised tokens."""
    model.zero_grad()
    rows, loss_sum, tokens = [], torch.zeros(()), 0
    for row, lengths in enumerate(DOCUMENTS):
        pieces = inputs["input_ids"][row].split(list(lengths))
        logits = [model(input_ids=piece[None]).logits[0] for piece in pieces]
        for one, piece in zip(logits, pieces, strict=True):
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(one[:-1].float(), piece[1:], reduction="sum")
            tokens += len(piece) - 1
        rows.append(torch.cat(logits))
    loss = loss_sum / tokens
    loss.backward()
    return _collect(model, torch.stack(rows), loss)


@lru_cache(maxsize=4)
def expected(case: Case, packed: bool) -> dict[str, Tensor]:
    """What every layout of a case must give, computed once."""
    vocab_size = case.published["vocab_size"]
    if packed:
        return expected_packed(reference_of(case), packed_inputs(vocab_size))
    return expected_unpacked(reference_of(case), unpacked_inputs(vocab_size))


def _collect(model: torch.nn.Module, logits: Tensor, loss: Tensor) -> dict[str, Tensor]:
    gradients = published_gradients(model)
    if own := getattr(model, "published_layout", None):
        gradients = own.tensors(gradients)
    named = {f"grad.{name}": grad for name, grad in gradients.items()}
    return {"logits": logits.detach(), "loss": loss.detach()} | named


def published_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The reference's gradients as its own save_pretrained would publish tensors of their kind."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.grad if theirs.grad is not None else torch.full_like(theirs, torch.nan))
        for buffer in published_buffers(twin).values():
            buffer.fill_(torch.nan)
    with TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        tensors = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if not tensor.isnan().all()}


def forward(
    ranks: Ranks,
    case: Case,
    layout: str,
    inputs: dict[str, Tensor],
    root: Path,
    run: Callable[[Path, int], list[int]] | None = None,
    extra: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """`job=forward grad=true` in one layout; what it wrote."""
    backend, world, overrides = LAYOUTS[layout]
    root.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in inputs.items()}, root / "batch.safetensors")
    weights = weights_directory(case, root.parent)
    config = freeze(
        root / "run",
        case.family,
        "job=forward",
        "grad=true",
        f"model.weights={weights}",
        f"data.inputs={root / 'batch.safetensors'}",
        "data.micro_batch_size=1",
        f"backend={backend}",
        *overrides,
        *extra,
    )
    codes = (run or ranks.run)(config, world)
    assert codes == [0] * world, (config.parent / "result.json").read_text()
    return load_file(config.parent / "outputs.safetensors")


def assert_close(
    got: dict[str, Tensor], expected: dict[str, Tensor], case: Case | None = None, layout: str = ""
) -> None:
    """Logits 1e-4 absolute, loss 1e-5, every gradient 1e-4 relative (norm-wise) or what the family says is rounding.

    No tensor more or less. What a `case` measured in a `layout` is kept, see `tests.measured`.
    """
    # Which experts were chosen is no output of the reference.
    got = {name: tensor for name, tensor in got.items() if not name.startswith("experts.")}
    assert set(got) == set(expected), set(got) ^ set(expected)
    assert got["logits"].shape == expected["logits"].shape
    logits = (got["logits"] - expected["logits"]).abs().max().item()
    loss = abs(got["loss"].item() - expected["loss"].item())
    gradients = {
        name: ((got[name] - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()
        for name, wanted in expected.items()
        if name.startswith("grad.")
    }
    assert logits <= 1e-4
    assert loss <= 1e-5
    limit = gradient_limit(case, 1e-4) if case else 1e-4
    far = {name: error for name, error in gradients.items() if not error <= limit}
    assert not far, far
    if case:
        record(case.family, layout, {"logits": logits, "loss": loss, "gradients": max(gradients.values(), default=0.0)})
