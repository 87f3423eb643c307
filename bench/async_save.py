"""How long a step waits for a save: in the background against at once, in turns, in one run.

    python bench/async_save.py --size 0_6b --layers 4

The state is a model's fp32 weights and both moments on the device. After each save the program waits for the background
one to end, so that both ways find the disk idle. "Blocked" is the time inside `CheckpointManager.save`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from engine.backends.base import TRAINED, Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.manager import CheckpointManager
from engine.family import load_dotted, load_family
from engine.schema import Checkpoint
from hardware import registry

FAMILY = load_family("qwen3")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="0_6b", help="a file of zoo/llm/qwen3/model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--saves", type=int, default=5, help="pairs of saves")
    parser.add_argument("--folder", help="where to write; the disk is what is measured")
    return parser.parse_args()


def state(shapes: dict[str, tuple[int, ...]], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of a training state by kind and name."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind} {name}": torch.randn(shape, generator=generator).to(device)
        for name, shape in shapes.items()
        for kind in TRAINED
    }


def slices(tensors: dict[str, torch.Tensor]) -> Iterator[Slice]:
    for key, tensor in tensors.items():
        kind, name = key.split()
        yield Slice(kind, name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def main() -> None:
    args = arguments()
    path = Path(__file__).parent.parent / "zoo" / "llm" / "qwen3" / "model" / f"{args.size}.yaml"
    config = load_dotted(FAMILY.config)(**yaml.safe_load(path.read_text()))
    config.num_hidden_layers = args.layers
    hardware = registry.get(args.hardware)
    hardware.bootstrap()
    tensors = state(load_dotted(FAMILY.weights)(config).published, hardware.device(0))
    size = sum(t.nbytes for t in tensors.values())
    blocked: dict[str, list[float]] = {"sync": [], "async": []}
    total: dict[str, list[float]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        settings = {way: Checkpoint("bench", keep_last=1, async_save=way == "async") for way in blocked}
        managers = {way: CheckpointManager(Path(folder) / way, s, Alone()) for way, s in settings.items()}
        for number in range(args.saves + 1):
            for way, manager in managers.items():
                begin = time.perf_counter()
                manager.save(number, slices(tensors), {"step": number})
                waited = time.perf_counter() - begin
                manager.wait()
                if number:  # the first save of either allocates its memory
                    blocked[way].append(waited)
                    total[way].append(time.perf_counter() - begin)
    medians = {way: statistics.median(times) for way, times in blocked.items()}
    print(
        json.dumps(
            {
                "GB": round(size / 1e9, 2),
                "blocked_s": {way: round(value, 4) for way, value in medians.items()},
                "until_complete_s": {way: round(statistics.median(times), 4) for way, times in total.items()},
                "blocked_ratio": round(medians["async"] / medians["sync"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
