"""A single rank in bf16: main weights beside the model, fused layers and loss, against fp32 by transformers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from engine.backends.base import TRAINED
from engine.backends.native import build
from engine.backends.native.model import reference_config
from engine.data.batch import rows_to_batch
from engine.errors import UserError
from engine.family import load_family
from engine.schema import Kernels, Optim, Precision
from hardware import registry
from hardware.base import HardwareError
from hardware.cpu import Cpu
from hardware.kernels.registry import Kernel
from tests.parallel.native_steps import model_config, run_of

QWEN3 = load_family("qwen3")
OPTIM = Optim(lr=3e-3)
ROWS, LENGTH, STEPS = 4, 32, 12


class Stored:
    """Tensors by kind and published name."""

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, kind, name, shape, offset, extent):
        return self.tensors[kind, name][tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def batches(micro: int):
    tokens = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7) % 23
    starts = torch.arange(LENGTH).expand(ROWS, LENGTH) == 0
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) % 5 == 3, -100)
    return [
        rows_to_batch(tokens[i : i + micro], labels[i : i + micro], starts[i : i + micro], list(range(i, i + micro)))
        for i in range(0, ROWS, micro)
    ]


def reference():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(reference_config(QWEN3, model_config())).float()


def native():
    run = replace(run_of("ddp"), precision=Precision("bf16"), optim=OPTIM)
    backend = build(run, QWEN3, registry.get("cpu"), "train")
    weights = {("param", n): p.detach() for n, p in reference().named_parameters()}
    backend.load_state(Stored(weights), ("param",))
    return backend, weights


def saved(backend):
    return {(s.kind, s.name): s.tensor.clone() for s in backend.state(TRAINED)}


@pytest.mark.parametrize("micro", [1, 4])
def test_losses_follow_the_reference_in_fp32(micro: int) -> None:
    backend, _ = native()
    model = reference()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    whole = batches(ROWS)[0]
    first = None
    for step in range(STEPS):
        result = backend.train_step(batches(micro), OPTIM.lr)
        logits = model(input_ids=whole.tokens_BS).logits
        loss = cross_entropy(logits.flatten(0, 1), whole.labels_BS.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad).item()
        optimizer.step()
        optimizer.zero_grad()
        first = first or loss.item()
        assert abs(result.loss_sum / result.num_tokens - loss.item()) / loss.item() < 0.01
        # Adam's first updates hardly depend on a gradient's size, so small differences grow: norms soon part.
        assert step > 3 or abs(result.grad_norm - norm) / norm < 0.01
    assert loss.item() < first - 0.5
    evaluated, tokens = backend.evaluate(batches(micro))
    assert abs(evaluated / tokens - loss.item()) < 0.2 and tokens == whole.num_tokens


def test_weights_and_state_are_kept_in_full_precision() -> None:
    backend, weights = native()
    for (kind, name), tensor in saved(backend).items():
        if kind == "param":
            assert torch.equal(tensor, weights["param", name]), name  # not rounded to bf16
    backend.train_step(batches(2), OPTIM.lr)
    middle = saved(backend)
    backend.train_step(batches(2), OPTIM.lr)
    resumed, _ = native()
    resumed.load_state(Stored(middle), TRAINED)
    resumed.set_optimizer_step(1)
    resumed.train_step(batches(2), OPTIM.lr)
    for key, tensor in saved(backend).items():
        assert torch.equal(tensor, saved(resumed)[key]), key


class WithAnOffer(Cpu):
    """A CPU that offers a kernel of a package that is not installed."""

    def kernels(self):
        return (Kernel("swiglu", "fast", "nowhere:nothing", 10, ("no_such_package",)),)


def test_strict_kernels_refuse_a_fallback_and_replicas_without_kernels(monkeypatch):
    run = replace(run_of("ddp"), precision=Precision("bf16"), optim=OPTIM)
    assert (
        build(run, QWEN3, WithAnOffer(), "train").kernels["swiglu"] == "torch (fast needs the package no_such_package)"
    )
    strict = replace(run, kernels=Kernels(strict=True))
    with pytest.raises(HardwareError, match=r"swiglu would fall back to torch: fast needs the package no_such_package"):
        build(strict, QWEN3, WithAnOffer(), "train")
    assert set(build(strict, QWEN3, Cpu(), "train").kernels.values()) == {"torch"}  # nothing better is offered
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match=r"kernels.strict=true: several replicas .* parallelism=fsdp"):
        build(strict, QWEN3, Cpu(), "train")
