"""Multi-token prediction as the paper has it (DeepSeek-V3, arXiv 2412.19437, section 2.2), over the reference's parts.

The transformer blocks TRM_k are layers of further reference models, each with random weights of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from engine.llm.predictors import PredictorNames, numbered
from tests import harness


@dataclass
class Model:
    """A reference model and its layers that look ahead."""

    case: harness.Case
    names: PredictorNames
    inner: torch.nn.Module
    others: list[torch.nn.Module]  # one for each depth; a layer of it is the block
    own: dict[str, Tensor]  # what a depth has besides, by published name
    hidden_first: bool = False
    norms_from_one: bool = False  # norms multiply by 1 + weight

    @property
    def depths(self) -> int:
        return len(self.others)

    @property
    def place(self) -> int:
        """The layer of the other models that is the block."""
        return self.case.config_object.predictor_layer() % self.case.layers

    def part(self, depth: int, name: str) -> Tensor:
        return self.own[getattr(self.names, name).replace("{i}", str(self.names.first + depth))]

    def renamed(self, depth: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of another model's published tensors those of the block, under their names here."""
        theirs, ours = f"model.layers.{self.place}.", self.names.layer.replace("{i}", str(self.names.first + depth))
        return {ours + name.removeprefix(theirs): t for name, t in tensors.items() if name.startswith(theirs)}


def build(case: harness.Case, depths: int, names: PredictorNames | None = None) -> Model:
    """Random weights that bite."""
    model = Model(
        case,
        names or numbered(case.layers),
        harness.reference(case.card, case.published),
        [harness.reference(case.card, case.published, seed=50 + depth) for depth in range(depths)],
        {},
        hidden_first=case.config_object.MTP_HIDDEN_FIRST,
        norms_from_one=case.family == "qwen3_next",
    )
    hidden, generator = model.inner.config.hidden_size, torch.Generator().manual_seed(9)
    for depth in range(depths):
        for name in ("token_norm", "hidden_norm", "projection", "norm"):
            matrix = name == "projection"
            value = torch.randn((hidden, 2 * hidden) if matrix else (hidden,), generator=generator)
            value = 0.1 * value if matrix else 0.3 * value + (0 if model.norms_from_one else 1)
            published = getattr(model.names, name).replace("{i}", str(model.names.first + depth))
            model.own[published] = value.requires_grad_()
    return model


def published(module: torch.nn.Module) -> dict[str, Tensor]:
    """What the reference's own save_pretrained writes."""
    with TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def save(model: Model, folder: Path, copies: bool = False) -> Path:
    """A published directory; with `copies`, with the copies of embeddings and head that DeepSeek's holds."""
    model.inner.save_pretrained(folder)
    tensors = published(model.inner) | {name: value.detach().clone() for name, value in model.own.items()}
    for depth, other in enumerate(model.others):
        tensors |= model.renamed(depth, published(other))
        at = str(model.names.first + depth)
        if copies:
            tensors[model.names.embedding.replace("{i}", at)] = (
                model.inner.get_input_embeddings().weight.detach().clone()
            )
            tensors[model.names.head.replace("{i}", at)] = model.inner.get_output_embeddings().weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"model_type": model.case.card.model_type}))
    return folder


def rms_norm(model: Model, x: Tensor, depth: int, name: str) -> Tensor:
    weight = model.part(depth, name) + (1 if model.norms_from_one else 0)
    return weight * x / (x.square().mean(-1, keepdim=True) + model.inner.config.rms_norm_eps).sqrt()


def block(model: Model, depth: int, x_TH: Tensor) -> Tensor:
    """TRM_k: the block of this depth over one document, causally."""
    inner, size = model.others[depth].model, x_TH.shape[0]
    mask = torch.zeros(1, 1, size, size).masked_fill(~torch.ones(size, size).bool().tril(), -torch.inf)
    positions = torch.arange(size)[None]
    out = inner.layers[model.place](
        x_TH[None],
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=inner.rotary_emb(x_TH[None], positions),
    )
    return (out[0] if isinstance(out, tuple) else out).reshape(size, -1)


def document_losses(model: Model, tokens_T: Tensor, labels_T: Tensor) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Loss sum, supervised tokens and logits of the model, then of each depth, in one document.

    `labels_T` are not shifted: -100 where a token is not to be learnt.
    """
    inner = model.inner
    hidden_TH = inner.model(input_ids=tokens_T[None]).last_hidden_state[0]
    head, embedding = inner.get_output_embeddings().weight, inner.get_input_embeddings().weight
    for k in range(model.depths + 1):
        if k:
            kept = max(0, len(tokens_T) - k)  # h_i^k exists where token i + k does
            if not kept:
                return
            # Eq. 21, the embedding first as most publish it, and eq. 22.
            ahead = rms_norm(model, embedding[tokens_T[k:]], k - 1, "token_norm")
            before = rms_norm(model, hidden_TH[:kept], k - 1, "hidden_norm")
            halves = [before, ahead] if model.hidden_first else [ahead, before]
            joined = linear(torch.cat(halves, dim=1), model.part(k - 1, "projection"))
            hidden_TH = rms_norm(model, block(model, k - 1, joined), k - 1, "norm")
        # Eq. 23: position i predicts token i + k + 1.
        logits = hidden_TH @ head.T
        targets = labels_T[k + 1 :]
        loss = cross_entropy(logits[: len(targets)], targets, ignore_index=-100, reduction="sum")
        yield loss, int((targets != -100).sum()), logits


def expected(model: Model, inputs: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Logits, losses and the gradients of the whole objective (eq. 24 and 25), by published name."""
    for module in (model.inner, *model.others):
        module.zero_grad()
    for value in model.own.values():
        value.grad = None
    starts = inputs.get("position_ids", torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])) == 0
    sums, counts, rows = [torch.zeros(())] * (model.depths + 1), [0] * (model.depths + 1), []
    for row, tokens in enumerate(inputs["input_ids"]):
        bounds = [*starts[row].nonzero().flatten().tolist(), len(tokens)]
        pieces = []
        for begin, end in pairwise(bounds):
            labels = inputs["labels"][row, begin:end]
            for k, (loss, count, logits) in enumerate(document_losses(model, tokens[begin:end], labels)):
                sums[k], counts[k] = sums[k] + loss, counts[k] + count
                pieces += [logits] if k == 0 else []
        rows.append(torch.cat(pieces))
    total = sums[0] + weight / model.depths * sum(sums[1:])
    (total / counts[0]).backward()
    means = [s.detach() / max(1, n) for s, n in zip(sums, counts, strict=True)]
    result = {"logits": torch.stack(rows).detach(), "loss": means[0], "mtp_loss": sum(means[1:]) / model.depths}
    if model.depths > 1:
        result |= {f"mtp_loss.{k}": means[k] for k in range(1, model.depths + 1)}
    gradients = harness.published_gradients(model.inner) | {name: value.grad for name, value in model.own.items()}
    for depth, other in enumerate(model.others):
        gradients |= model.renamed(depth, harness.published_gradients(other))
    return result | {f"grad.{name}": gradient for name, gradient in gradients.items()}
