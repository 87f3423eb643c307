"""A step of the Megatron backend in several layouts: its time, and the memory that it takes on each rank.

    python -m bench.layouts single cp2                            # tiny, on this machine's hardware
    python -m bench.layouts single cp2 --size 0_6b --seq-len 32768 --rows 1 --precision bf16
    python -m bench.layouts pp2 pp2_vpp2 --size 0_6b --rows 8 --precision bf16

A layout is a file of conf/parallelism; each runs in its own processes, one after another. "step" is how far the memory
of a rank rises above what it holds between steps (weights, gradients, optimizer): activations, logits and buffers of
the kernels. On a CPU it is resident memory and less exact.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
import yaml

from bench.native_step import FAMILY, batches, model_config
from engine.schema import Optim, Parallelism, Precision, Run
from hardware import registry
from hardware.base import Hardware

PRESETS = Path(__file__).parent.parent / "conf" / "parallelism"
OPTIM = Optim(lr=1e-4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="+", help="files of conf/parallelism")
    parser.add_argument("--size", default="tiny", help="a file of zoo/llm/qwen3/model")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1, help="of a step, over all ranks")
    parser.add_argument("--micro", type=int, default=1, help="rows of a forward pass")
    parser.add_argument("--documents", type=int, default=1, help="in each row")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two others")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    return parser.parse_args()


def layout_of(name: str, recompute: str = "none") -> Parallelism:
    return Parallelism(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) | {"recompute": recompute})


class Random:
    """Weights that keep activations in range, the same in every layout."""

    def read(self, kind: str, name: str, shape: tuple, offset: tuple, extent: tuple) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(extent)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        rows = torch.randn(shape, generator=generator)[
            tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
        ]
        return 0.02 * rows


def one_rank(args: argparse.Namespace, hardware: Hardware) -> dict[str, float]:
    """This rank's figures for the only layout in `args`."""
    from engine.backends import megatron

    local = int(os.environ["LOCAL_RANK"])
    hardware.bootstrap()
    hardware.set_device(local)
    torch.distributed.init_process_group(hardware.dist_backend)
    config = model_config(args.size, args.layers)
    layout, precision = layout_of(args.layouts[0], args.recompute), Precision(args.precision)
    run = Run(family=FAMILY.name, model=config, optim=OPTIM, precision=precision, parallelism=layout)
    backend = megatron.build(run, FAMILY, hardware, "train")
    backend.load_state(Random(), ("param",))
    backend.set_optimizer_step(0)
    share = args.rows // backend.dp_size
    data = batches(config.vocab_size, args.rows, args.micro, args.seq_len, args.documents)
    data = data[backend.dp_rank * share // args.micro : (backend.dp_rank + 1) * share // args.micro]
    seconds, rises, losses = [], [], []
    for _ in range(2 + args.steps):
        hardware.synchronize()
        hardware.reset_peak_memory()
        resting, begin = hardware.memory().used, time.perf_counter()
        result = backend.train_step(data, OPTIM.lr)
        hardware.synchronize()
        seconds.append(time.perf_counter() - begin)
        rises.append(hardware.memory().peak - resting)
        losses.append(result.loss_sum / result.num_tokens)
    backend.close()
    torch.distributed.destroy_process_group()
    step, rise = statistics.median(seconds[2:]), statistics.median(rises[2:])
    return {"seconds": step, "rise": rise, "resting": resting, "first_loss": losses[0], "last_loss": losses[-1]}


def all_ranks(name: str, hardware: Hardware) -> list[dict[str, float]]:
    """The figures of every rank of a layout."""
    layout = layout_of(name)
    world = layout.tp * layout.cp * layout.pp * (layout.dp or 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = [word for word in sys.argv[1:] if not (PRESETS / f"{word}.yaml").exists()]
    ranks = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = os.environ | hardware.launch_env(rank, world) | {k: str(v) for k, v in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "bench.layouts", name, *names]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{name} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    args = arguments()
    hardware = registry.get(args.hardware)
    if "RANK" in os.environ:
        print(json.dumps(one_rank(args, hardware)), flush=True)
        return
    print(f"{args.size}, {args.rows} x {args.seq_len} tokens, {args.precision}, recompute={args.recompute}")
    first: tuple[float, float] | None = None
    for name in args.layouts:
        ranks = all_ranks(name, hardware)
        step, rise = max(r["seconds"] for r in ranks), max(r["rise"] for r in ranks)
        resting = max(r["resting"] for r in ranks)
        first = first or (step, rise)
        print(
            f"{name:12} {len(ranks)} ranks  step {step * 1e3:9.1f} ms ({step / first[0]:.3f})  memory at rest "
            f"{resting / 2**30:6.2f} GiB, step {rise / 2**30:6.2f} GiB ({rise / first[1]:.3f})  "
            f"loss {ranks[0]['first_loss']:.5f} to {ranks[0]['last_loss']:.5f}"
        )


if __name__ == "__main__":
    main()
