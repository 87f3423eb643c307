"""A step of the native backend against a bare PyTorch loop over the same transformers model, in one process.

    python -m bench.native_step                                   # tiny, on this machine's hardware
    python -m bench.native_step --size 0_6b --seq-len 4096 --rows 4 --micro 4 --precision bf16

Both sides train their own copy on the same batches; steps alternate, and so does who goes first. Printed: each side's
median time, tokens per second, and the median of the pairwise ratios (below 1: the native backend is faster).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import yaml

from engine.backends.native import build
from engine.backends.native.model import reference_config
from engine.data.batch import Batch, rows_to_batch
from engine.family import load_dotted, load_family
from engine.schema import Optim, Parallelism, Precision, Run
from hardware import registry
from hardware.base import Hardware

FAMILY = load_family("qwen3")
OPTIM = Optim(lr=1e-4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help="a file of zoo/llm/qwen3/model")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--micro", type=int, default=4, help="rows of a forward pass")
    parser.add_argument("--steps", type=int, default=12, help="timed pairs of steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compile", action="store_true", help="both sides")
    parser.add_argument("--documents", type=int, default=1, help="in each row of the native side: 1 is dense rows")
    return parser.parse_args()


def model_config(size: str, layers: int | None) -> object:
    path = Path(__file__).parent.parent / "zoo" / "llm" / "qwen3" / "model" / f"{size}.yaml"
    keys = yaml.safe_load(path.read_text())
    config = load_dotted(FAMILY.of(keys.get("model_type")).config)(**keys)
    if layers:
        config.num_hidden_layers = layers
    return config


def batches(vocab_size: int, rows: int, micro: int, length: int, documents: int) -> list[Batch]:
    """The micro-batches of one step; every token is supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for first in range(0, rows, micro):
        tokens = torch.randint(0, vocab_size, (micro, length), generator=generator)
        starts = (torch.arange(length) % -(-length // documents) == 0).expand(micro, length)
        made.append(rows_to_batch(tokens, tokens.roll(-1, 1), starts, list(range(first, first + micro))))
    return made


def bare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch], device: torch.device, bf16: bool
) -> float:
    """What one would write by hand."""
    count = sum(batch.labels_BS.numel() for batch in data)
    total = torch.zeros((), device=device)
    for batch in data:
        tokens, labels = batch.tokens_BS.to(device), batch.labels_BS.to(device)
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
        )
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total.item()


def bare_side(args: argparse.Namespace, hardware: Hardware, config: object, data: list[Batch]) -> Callable[[], float]:
    device = hardware.device(0)
    with device:
        model = load_dotted(FAMILY.reference)(reference_config(FAMILY, config)).float()
    model.train()
    if args.compile:
        model.compile()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    fused = hardware.supports("fused_adamw")
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, fused=fused)
    return lambda: bare_step(model, optimizer, data, device, args.precision == "bf16")


def native_side(args: argparse.Namespace, hardware: Hardware, config: object, data: list[Batch]) -> Callable[[], float]:
    run = Run(
        family=FAMILY.name,
        backend="native",
        model=config,
        optim=OPTIM,
        precision=Precision(args.precision, compile=args.compile),
        parallelism=Parallelism(strategy="ddp"),
    )
    backend = build(run, FAMILY, hardware, "train")
    generator = torch.Generator().manual_seed(1)

    class Random:
        def read(self, kind, name, shape, offset, extent):  # type: ignore[no-untyped-def]
            return torch.ones(extent) if len(extent) == 1 else 0.02 * torch.randn(extent, generator=generator)

    backend.load_state(Random(), ("param",))

    def step() -> float:
        result = backend.train_step(data, OPTIM.lr)
        return result.loss_sum / result.num_tokens

    return step


def timed(step: Callable[[], float], hardware: Hardware) -> float:
    hardware.synchronize()
    start = time.perf_counter()
    step()
    hardware.synchronize()
    return time.perf_counter() - start


def main() -> None:
    args = arguments()
    hardware = registry.get(args.hardware)
    hardware.bootstrap()
    hardware.set_device(0)
    config = model_config(args.size, args.layers)
    data = batches(config.vocab_size, args.rows, args.micro, args.seq_len, 1)
    packed = batches(config.vocab_size, args.rows, args.micro, args.seq_len, args.documents)
    sides = {"native": native_side(args, hardware, config, packed), "bare": bare_side(args, hardware, config, data)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(args.warmup + args.steps):
        for name in sorted(sides, reverse=pair % 2 == 1):
            taken = timed(sides[name], hardware)
            if pair >= args.warmup:
                seconds[name].append(taken)
    tokens = args.rows * args.seq_len
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = tokens / median
        print(f"{name:7} median {median * 1e3:9.2f} ms  min {min(values) * 1e3:9.2f} ms  {rate:10,.0f} tokens/s")
    ratios = [a / b for a, b in zip(seconds["native"], seconds["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"native / bare: median of pairs {middle:.4f} (quartiles {low:.4f} to {high:.4f}); {hardware.spec().name}")
    print(hardware.memory_report())


if __name__ == "__main__":
    main()
