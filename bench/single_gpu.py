"""Training steps on one GPU: our backends against transformers with Liger-Kernel, each side in a process of its own.

    python -m bench.single_gpu --size 1_7b                 # 4 rows of 4096 tokens
    python -m bench.single_gpu --size 0_6b --sides peer native megatron
    python -m bench.single_gpu --size 30b_a3b --layers 8 --sides peer peer_fp32 native megatron

Sides: `peer` transformers with Liger-Kernel, bf16 weights and AdamW state; `peer_fp32` the same with fp32 weights and
state, bf16 compute (autocast); `transformers` as `peer`, without Liger-Kernel; `native` and `megatron` our defaults,
fp32 main weights and state; `packed` and `packed_megatron`: on rows of documents of 100 to 4,000 tokens. The sides take
turns `--rounds` times and the fastest median of a side counts, since a GPU's clock drifts. The peer's experts are
transformers' `grouped_mm`. `--profile DIR` writes a table of the kernels of each side's step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench.native_step import FAMILY, OPTIM, batches, model_config
from engine.backends.native.model import reference_config
from engine.data.batch import Batch, rows_to_batch
from engine.family import load_dotted
from engine.schema import Parallelism, Precision, Run
from hardware import registry
from hardware.base import Hardware

SIDES = ("peer", "peer_fp32", "transformers", "native", "megatron", "packed", "packed_megatron")


def peer(hardware: Hardware, config: object, batch: Batch, fp32: bool, liger: bool) -> Callable[[], float]:
    """What a well-informed user of transformers writes."""
    family = FAMILY.of(config.model_type)
    experts = {"experts_implementation": "grouped_mm"} if config.mixture() else {}
    if liger:
        from liger_kernel import transformers as kernels

        getattr(kernels, f"apply_liger_kernel_to_{config.model_type}")(swiglu=not experts)
    device = hardware.device(0)
    with device:
        dtype = torch.float32 if fp32 else torch.bfloat16
        theirs = reference_config(family, config)
        model = load_dotted(family.reference)._from_config(theirs, dtype=dtype, attn_implementation="sdpa", **experts)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, fused=True)
    tokens = batch.tokens_BS.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=fp32):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(backend_name: str, hardware: Hardware, config: object, batch: Batch, compiled: bool) -> Callable[[], float]:
    """One of our backends, as a run builds it."""
    run = Run(
        family=FAMILY.name,
        backend=backend_name,
        model=config,
        optim=OPTIM,
        precision=Precision("bf16", compile=compiled),
        parallelism=Parallelism(name="single", strategy="ddp"),
    )
    run.data.seq_len, run.data.micro_batch_size, run.data.global_batch_size = batch.tokens_BS.shape[1], 4, 4
    dist.init_process_group(hardware.dist_backend, rank=0, world_size=1, store=dist.HashStore())
    build = load_dotted(f"engine.backends.{backend_name}:build")
    backend = build(run, FAMILY.of(config.model_type), hardware, "train")
    generator = torch.Generator(hardware.device(0)).manual_seed(1)

    def read(kind: str, name: str, shape: tuple, offset: tuple, extent: tuple) -> torch.Tensor:
        if len(extent) == 1:
            return torch.ones(extent)
        return 0.02 * torch.randn(extent, generator=generator, device=hardware.device(0))

    backend.load_state(SimpleNamespace(read=read), ("param",))
    print(getattr(backend, "kernels", {}), file=sys.stderr)

    def step() -> float:
        result = backend.train_step([batch], OPTIM.lr)
        return result.loss_sum / result.num_tokens

    return step


def documents(vocab_size: int, rows: int, length: int) -> Batch:
    """Rows cut into documents of 100 to 4,000 tokens, uniformly drawn."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator)
    starts = torch.zeros(rows * length, dtype=torch.bool)
    at = 0
    while at < rows * length:
        starts[at] = True
        at += int(torch.randint(100, 4001, (), generator=generator))
    starts = starts.view(rows, length)
    starts[:, 0] = True
    return rows_to_batch(tokens, tokens.roll(-1, 1), starts, list(range(rows)))


def write_profile(step: Callable[[], float], hardware: Hardware, path: Path) -> None:
    """The kernels of three steps, those that take most time first."""
    with torch.profiler.profile(activities=hardware.profiler_activities()) as profile:
        for _ in range(3):
            step()
        hardware.synchronize()
    averages = profile.key_averages()
    total = sum(event.self_device_time_total for event in averages if event.device_type.name != "CPU")
    table = averages.table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{total / 3e3:.1f} ms of kernels in a step\n{table}\n")


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step, and the most memory the tensors took."""
    hardware = registry.get("auto")
    hardware.bootstrap()
    hardware.set_device(0)
    config = model_config(args.size, args.layers)
    dense = batches(config.vocab_size, args.rows, args.rows, args.seq_len, 1)[0]
    if side in ("peer", "peer_fp32", "transformers"):
        step = peer(hardware, config, dense, fp32=side == "peer_fp32", liger=side != "transformers")
    else:
        batch = documents(config.vocab_size, args.rows, args.seq_len) if "packed" in side else dense
        step = ours("megatron" if "megatron" in side else "native", hardware, config, batch, not args.no_compile)
    seconds = []
    for number in range(args.warmup + args.steps):
        hardware.synchronize()
        start = time.perf_counter()
        loss = step()
        hardware.synchronize()
        if number >= args.warmup:
            seconds.append(time.perf_counter() - start)
    peak = hardware.memory().peak / 2**30
    if args.profile:
        write_profile(step, hardware, args.profile / f"{args.size}_{side}.txt")
    return {"seconds": statistics.median(seconds), "gib": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1_7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="DIR")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for side in args.sides:
            command = [sys.executable, "-m", "bench.single_gpu", *sys.argv[1:], "--measure", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{side:10} failed")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            if side not in best or found["seconds"] < best[side]["seconds"]:
                best[side] = found
    tokens = args.rows * args.seq_len
    for side, found in best.items():
        ratio = best[args.sides[0]]["seconds"] / found["seconds"] if args.sides[0] in best else float("nan")
        print(
            f"{args.size} {side:10} {found['seconds'] * 1e3:8.1f} ms {tokens / found['seconds']:10,.0f} tokens/s "
            f"{found['gib']:6.1f} GiB  {ratio:6.3f} x {args.sides[0]}"
        )


if __name__ == "__main__":
    main()
