"""Training steps of a policy at its published size on one GPU, as a run of the native backend does them.

    python -m bench.policy_step --family pi05 --size base --batch 32        # three cameras of 224 x 224
    python -m bench.policy_step --family pi05 --size tiny --batch 4 --steps 2 --image 28

Batches are random and lie on the device already: what decoding takes is another table. `--profile DIR` writes a table
of the kernels. lerobot 0.6.1's own step on such a card (Pi0.5, bf16, gradient checkpointing): 14.1 samples/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import yaml

from bench.single_gpu import write_profile
from engine.backends import compiled
from engine.backends.native import build
from engine.data.policy_batch import PolicyBatch
from engine.family import load_dotted, load_family
from engine.schema import Optim, Parallelism, Precision, Run
from hardware import registry


def random_batch(config: object, rows: int, image: int) -> PolicyBatch:
    """What a processor makes of samples with three cameras, uint8, and a prompt that fills half of its places."""
    draw = torch.Generator().manual_seed(0)
    cameras = ("top", "left", "right")
    steps, numbers, length = config.chunk_size, config.max_action_dim, config.tokenizer_max_length
    tokens = torch.randint(5, config.vocab_size, (rows, length), generator=draw)
    return PolicyBatch(
        images={
            name: torch.randint(0, 256, (rows, image, image, 3), dtype=torch.uint8, generator=draw) for name in cameras
        },
        image_masks={name: torch.ones(rows, dtype=torch.bool) for name in cameras},
        state=torch.randn(rows, 7, generator=draw),
        actions=torch.randn(rows, steps, 7, generator=draw),
        action_pad=torch.zeros(rows, steps, dtype=torch.bool),
        tokens=tokens,
        token_mask=(torch.arange(length) < length // 2).expand(rows, length),
        noise=torch.randn(rows, steps, numbers, generator=draw),
        time=torch.rand(rows, generator=draw) * 0.99 + 0.001,
        sample_ids=list(range(rows)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="pi05", choices=("pi05",))
    parser.add_argument("--size", default="base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--recompute", default="none", choices=("none", "full"))
    parser.add_argument("--keep", type=float, help="share of a compiled layer's activations that is kept")
    parser.add_argument("--profile", type=Path, metavar="DIR")
    args = parser.parse_args()
    hardware = registry.get("auto")
    hardware.bootstrap()
    hardware.set_device(0)
    family = load_family(args.family)
    path = Path(__file__).parent.parent / "zoo" / "embodied" / args.family / "model" / f"{args.size}.yaml"
    config = load_dotted(family.config)(**yaml.safe_load(path.read_text()))
    if args.image != 224:
        config.image_size = args.image
    compiled.KEPT_ACTIVATIONS = args.keep or compiled.KEPT_ACTIVATIONS
    run = Run(
        family=family.name,
        backend="native",
        model=config,
        optim=Optim(lr=2.5e-5),
        precision=Precision("bf16", compile=hardware.supports("compile")),
        parallelism=Parallelism(name="single", strategy="ddp", recompute=args.recompute),
    )
    dist.init_process_group(hardware.dist_backend, rank=0, world_size=1, store=dist.HashStore())
    backend = build(run, family, hardware, "train")
    device = hardware.device(0)
    draw = torch.Generator(device).manual_seed(1)

    def read(kind: str, name: str, shape: tuple, offset: tuple, extent: tuple) -> torch.Tensor:
        return 0.02 * torch.randn(extent, generator=draw, device=device)

    backend.load_state(SimpleNamespace(read=read), ("param",))
    batch = random_batch(config, args.batch, args.image).to(device)

    def step() -> float:
        result = backend.train_step([batch], 2.5e-5)
        return result.loss_sum / result.num_tokens

    seconds, losses = [], []
    for number in range(args.warmup + args.steps):
        hardware.synchronize()
        start = time.perf_counter()
        losses.append(step())
        hardware.synchronize()
        if number >= args.warmup:
            seconds.append(time.perf_counter() - start)
    median, peak = statistics.median(seconds), hardware.memory().peak / 2**30
    print(f"{args.family} {args.size} batch {args.batch} keep {compiled.KEPT_ACTIVATIONS} recompute {args.recompute}")
    print(f"  {1e3 * median:.1f} ms a step, {args.batch / median:.1f} samples/s, {peak:.1f} GiB, {backend.kernels}")
    print("  losses " + " ".join(f"{loss:.4f}" for loss in losses))
    if args.profile:
        write_profile(step, hardware, args.profile / f"{args.family}_{args.size}.txt")


if __name__ == "__main__":
    main()
