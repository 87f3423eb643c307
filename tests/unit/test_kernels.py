"""Kernels against formulas and against torch's own operations; those of an accelerator where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import silu

from hardware.kernels.adamw import join_main, split_adamw, split_main
from hardware.kernels.gated_mlp import gated_mlp
from hardware.kernels.linear_cross_entropy import linear_cross_entropy
from hardware.kernels.registry import Kernel, choose

GPU = torch.accelerator.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no accelerator here"))]


def kernel(operation: str, device: str):
    """The reference on the CPU, the NVIDIA plugin's best on a GPU."""
    from hardware.nvidia import KERNELS

    return choose(operation, KERNELS if device != "cpu" else (), "bf16").kernel.load()


def test_main_weights_are_kept_bit_for_bit():
    values = torch.cat([torch.randn(5000) * 10.0 ** torch.randint(-30, 30, (5000,)), torch.tensor([0.0, -0.0, 1e-45])])
    weight, remainder = split_main(values)
    assert torch.equal(join_main(weight, remainder).view(torch.int32), values.view(torch.int32))
    # Rounded to nearest: nothing in bf16 is closer.
    assert ((weight.float() - values).abs() <= (values.bfloat16().float() - values).abs()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_split_adamw_takes_torchs_steps(device, grad_dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(7,), (3, 5), (64, 129), (1,), (2048 * 3,)]
    mains = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    theirs = [torch.nn.Parameter(main.clone()) for main in mains]
    torchs = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    halves = [split_main(main) for main in mains]
    weights, remainders = [w.clone() for w, _ in halves], [r.clone() for _, r in halves]
    moments = [[torch.zeros_like(main) for main in mains] for _ in range(2)]
    update = kernel("split_adamw", device)
    for step in range(1, 6):
        grads = [torch.randn(shape, generator=generator).to(device, grad_dtype) for shape in shapes]
        update(
            weights,
            remainders,
            grads,
            *moments,
            lr=3e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=step,
            grad_scale=0.5,
        )
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.float() * 0.5
        torchs.step()
    for weight, remainder, wanted in zip(weights, remainders, theirs, strict=True):
        torch.testing.assert_close(join_main(weight, remainder), wanted.detach(), rtol=2e-6, atol=2e-6)


def test_split_adamw_of_nothing():
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0, "step": 1, "grad_scale": 1.0}
    split_adamw([], [], [], [], [], **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 6, 10), (3, 7, 4), (2, 5, 2050)])
def test_gated_mlp_is_the_formula(device, shape):
    rows, hidden, width = shape
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    x = torch.randn(2, rows, hidden, generator=generator)
    matrices = [torch.randn(s, generator=generator) / 3 for s in ((width, hidden), (width, hidden), (hidden, width))]
    ours = [t.to(device, dtype).requires_grad_() for t in (x, *matrices)]
    theirs = [t.detach().double().cpu().requires_grad_() for t in ours]
    out = gated_mlp(*ours, kernel("swiglu", device))
    gate, up, down = theirs[1:]
    wanted = (silu(theirs[0] @ gate.t()) * (theirs[0] @ up.t())) @ down.t()
    weights = torch.randn(wanted.shape, generator=generator).double()
    (out.double().cpu() * weights).sum().backward()
    (wanted * weights).sum().backward()
    for got, want in [(out, wanted), *zip((t.grad for t in ours), (t.grad for t in theirs), strict=True)]:
        error = (got.double().cpu() - want).norm() / want.norm()
        assert error < (1e-6 if device == "cpu" else 2e-2), error


@pytest.mark.parametrize("device", DEVICES)
def test_linear_cross_entropy_sums_over_labels(device):
    generator = torch.Generator().manual_seed(2)
    tokens, hidden, vocab = 37, 16, 131
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    h = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    loss = kernel("linear_cross_entropy", device)(h, w, labels.to(device))
    loss.backward()
    h64, w64 = (t.detach().double().cpu().requires_grad_() for t in (h, w))
    log_probs = torch.log_softmax(h64 @ w64.t(), -1)
    wanted = -sum(log_probs[i, label] for i, label in enumerate(labels.tolist()) if label >= 0)
    wanted.backward()
    bound = 1e-5 if device == "cpu" else 2e-2
    assert abs(loss.item() - wanted.item()) / wanted.item() < bound
    for got, want in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (got.double().cpu() - want).norm() / want.norm() < bound


def test_no_label_is_no_loss():
    loss = linear_cross_entropy(torch.randn(3, 4), torch.randn(9, 4), torch.full((3,), -100))
    assert loss.item() == 0 and math.isfinite(loss.item())


def test_the_best_usable_kernel_is_chosen_and_the_rest_explained():
    from hardware.base import HardwareError

    offers = [
        Kernel("swiglu", "absent", "nowhere:nothing", 20, ("no_such_package",)),
        Kernel("swiglu", "half", "nowhere:nothing", 15, dtypes=("bf16",)),
        Kernel("swiglu", "b", "nowhere:nothing", 5),
        Kernel("swiglu", "a", "nowhere:nothing", 5),
    ]
    assert choose("swiglu", offers, "bf16").kernel.name == "half"
    choice = choose("swiglu", offers, "fp32")
    assert choice.kernel.name == "a"
    assert str(choice) == "a (absent needs the package no_such_package; half does not compute in fp32)"
    with pytest.raises(HardwareError, match="needs the package no_such_package"):
        choose("swiglu", offers, "bf16", strict=True)
    assert choose("swiglu", (), "bf16", strict=True).kernel.name == "torch"
