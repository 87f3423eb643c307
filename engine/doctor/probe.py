"""The self-test, in a process of its own: what training needs of the device, each against a plain computation.

    python -m engine.doctor.probe HARDWARE

Prints a JSON line before each test, {"test"}, and one after it, {"test", "ok", "words", "seconds"}, so that whoever
reads them knows in which test a process died. Ends after the first test that the others depend on.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hardware import registry
from hardware.base import Hardware, HardwareError
from hardware.kernels.registry import REFERENCES, choose

BLOCK = 64 * 2**20  # bytes that are allocated
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # norm-wise, against float64; unit roundoffs are 6e-8 and 4e-3
LONG_ENOUGH_S = 1e-3  # for a matmul to be timed by the clock


class Failed(Exception):
    """A test's result is not what it must be."""


def runtime(hardware: Hardware) -> str:
    """torch, the device's runtime, and the device's name."""
    hardware.bootstrap()  # before torch, which a runtime may have to patch while it is imported
    import torch

    hardware.set_device(0)
    spec = hardware.spec()
    return f"torch {torch.__version__}, {spec.name}, {spec.memory_bytes / 2**30:.0f} GiB"


def allocation(hardware: Hardware) -> str:
    """Every byte that is written can be read back."""
    import torch

    device = hardware.device(0)
    pattern = torch.arange(BLOCK // 8, device=device)
    if int(pattern.cpu().sum()) != (BLOCK // 8) * (BLOCK // 8 - 1) // 2:
        raise Failed("what was written is not what is read")
    return f"{BLOCK // 2**20} MiB there and back; {hardware.memory_report()}"


def matmul(hardware: Hardware) -> str:
    """Products in both precisions against float64 on the CPU, and how fast the larger ones are."""
    import torch

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(257, 257, generator=generator, dtype=torch.float64) for _ in range(2))
    words = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x, y = a.to(hardware.device(0), dtype), b.to(hardware.device(0), dtype)
        _check(f"{name} product", (x @ y).cpu(), x.cpu().double() @ y.cpu().double(), TOLERANCE[name])
        flops = _flops(hardware, dtype)
        words.append(f"{flops / 1e12:.3g} TFLOP/s in {name}")
    return ", ".join(words) + _of_peak(hardware, flops)


def _flops(hardware: Hardware, dtype: Any) -> float:
    """Of the first square matmul, from 256 on in powers of two, that takes long enough to be timed."""
    import torch

    size, spent = 128, 0.0
    while spent < LONG_ENOUGH_S and size < 8192:
        size *= 2
        x = torch.ones(size, size, device=hardware.device(0), dtype=dtype)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(x, x)
            hardware.synchronize()
            times.append(time.perf_counter() - start)
        spent = min(times[1:])
    return 2 * size**3 / spent


def _of_peak(hardware: Hardware, flops: float) -> str:
    peak = hardware.spec().peak_flops.get("bf16")
    return f" ({flops / peak.value:.0%} of its peak, {peak.source})" if peak is not None and peak.value else ""


def attention(hardware: Hardware) -> str:
    """Causal attention inside documents of odd lengths, and its gradients, against its formula in float64."""
    import torch

    kernels = hardware.attention()
    dtype = torch.bfloat16
    lengths, (heads, groups, width) = (1, 37, 26), (4, 2, 64)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(2)
    shapes = ((total, heads, width), (total, groups, width), (total, groups, width), (total, heads, width))
    q, k, v, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    results = []
    for device, number in ((hardware.device(0), dtype), (torch.device("cpu"), torch.float64)):
        inputs = [x.detach().to(device, number).clone().requires_grad_() for x in (q, k, v)]
        if number is torch.float64:
            out = _formula(*inputs, lengths)
        else:
            out = kernels.varlen(*inputs, cu_seqlens.to(device), max(lengths))
        out.backward(grad.to(device, number))
        results.append([out, *(x.grad for x in inputs)])
    for name, got, wanted in zip(("output", "gradient of q", "gradient of k", "gradient of v"), *results, strict=True):
        _check(f"attention's {name}", got.detach().cpu(), wanted.detach(), TOLERANCE["bfloat16"])
    return f"{type(kernels).__name__}, forward and backward in bfloat16"


def _formula(q: Any, k: Any, v: Any, lengths: tuple[int, ...]) -> Any:
    """softmax(q k^T / sqrt(D)) v under a causal mask, document by document (Vaswani et al., arXiv 1706.03762)."""
    import torch

    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    parts = []
    for q1, k1, v1 in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q1, k1) / q1.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v1))
    return torch.cat(parts)


def collective(hardware: Hardware) -> str:
    """A process group of one on the hardware's own backend."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(hardware.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.arange(5.0, device=hardware.device(0))
        gathered = torch.empty_like(values)
        dist.all_reduce(values)
        dist.all_gather_into_tensor(gathered, values)
        if gathered.cpu().tolist() != [0.0, 1.0, 2.0, 3.0, 4.0]:
            raise Failed(f"a sum over one rank gives {gathered.cpu().tolist()}")
    finally:
        dist.destroy_process_group()
    return f"all_reduce and all_gather of one rank by {hardware.dist_backend}"


def kernels(hardware: Hardware) -> str:
    """The kernels that would be chosen can be loaded."""
    chosen = {operation: choose(operation, hardware.kernels(), "bf16").kernel for operation in REFERENCES}
    for operation, kernel in chosen.items():
        try:
            kernel.load()
        except Exception as error:
            raise Failed(f"{operation} by {kernel.name} does not load: {type(error).__name__}: {error}") from error
    return f"{', '.join(chosen)} load"


def _check(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    if not error <= tolerance:  # also where it is no number
        raise Failed(f"the {what} is {error:.1e} off, more than {tolerance:.0e}")


TESTS: dict[str, Callable[[Hardware], str]] = {
    "runtime": runtime,
    "allocation": allocation,
    "matmul": matmul,
    "attention": attention,
    "collective": collective,
    "kernels": kernels,
}
FIRST = ("runtime", "allocation")  # without these the others say nothing more


def run(hardware: Hardware, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run the tests in order; `tell` gets what the module's docstring shows."""
    for name, test in TESTS.items():
        tell({"test": name})
        start = time.perf_counter()
        try:
            ok, words = True, test(hardware)
        except Exception as error:
            known = isinstance(error, (Failed, HardwareError))
            ok, words = False, str(error) if known else f"{type(error).__name__}: {str(error).strip()}"
            if not known:
                traceback.print_exc()
        line = words.strip().splitlines()[0] if words.strip() else name
        tell({"test": name, "ok": ok, "words": line, "seconds": time.perf_counter() - start})
        if not ok and name in FIRST:
            return


def main() -> None:
    """Entry point of `python -m engine.doctor.probe`."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no result
    run(registry.get(sys.argv[1]), lambda event: print(json.dumps(event), file=out, flush=True))


if __name__ == "__main__":
    main()
