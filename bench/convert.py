"""How much memory a conversion takes: a sharded Hugging Face directory to a checkpoint and back, by one process each.

    python -m bench.convert --scale 8

The weights are those of an 8B model (Qwen3-8B's structure: 36 layers, its vocabulary) with every width divided by the
root of `--scale`, in as many shards as the whole would have; their numbers are a few random blocks over and over. Each
direction runs `job=convert` in a process of its own, whose anonymous memory (RssAnon, what no file backs) is read while
it runs. Wanted: less than 1.2 times the largest shard file plus 1 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.config import config_text, to_published
from engine.checkpoint.hf import MAX_SHARD_BYTES
from engine.checkpoint.tensor_file import TensorFile, header_room
from engine.family import load_dotted, load_family

FAMILY = load_family("qwen3")
WIDTHS = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}


@dataclass(frozen=True)
class Measured:
    """One conversion."""

    seconds: float
    peak_bytes: int  # anonymous
    largest_file: int  # of the directory that was converted first

    @property
    def limit(self) -> float:
        return 1.2 * self.largest_file + 1e9


def write_model(folder: Path, scale: int) -> int:
    """A published directory with random weights; its parameters."""
    root = round(scale**0.5)
    keys = {name: width // root for name, width in WIDTHS.items()}
    config = load_dotted(FAMILY.config)(num_hidden_layers=36, rope_theta=1e6, rms_norm_eps=1e-6, **keys)
    shapes = load_dotted(FAMILY.weights)(config).published
    folder.mkdir()
    (folder / "config.json").write_text(config_text(to_published(FAMILY, config), "BF16"))
    blocks = [torch.randn(1 << 24).to(torch.bfloat16) for _ in range(3)]
    shards: list[list[str]] = [[]]
    size, most = 0, MAX_SHARD_BYTES // scale
    for name, shape in shapes.items():
        needed = 2 * torch.Size(shape).numel()
        if shards[-1] and size + needed > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += needed
    index = {}
    for number, names in enumerate(shards):
        path = folder / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = TensorFile(path, header_room([(name, "BF16", shapes[name]) for name in names], {"format": "pt"}))
        for place, name in enumerate(names):
            count = torch.Size(shapes[name]).numel()
            block = blocks[place % len(blocks)]
            file.add(name, block.repeat(-(-count // block.numel()))[:count].view(shapes[name]))
            index[name] = path.name
        file.close()
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def convert(*words: str) -> tuple[float, int]:
    """Seconds and the highest anonymous memory of any process of one `job=convert`."""
    command = [sys.executable, "-m", "zoo.qwen3", "job=convert", "hardware=cpu", *words]
    begin, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, *(anonymous(pid) for pid in tree(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - begin, peak


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(found for child in below for found in tree(int(child)))]


def anonymous(pid: int) -> int:
    """Bytes that no file backs; 0 for a process that has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def largest(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=16, help="how many times smaller than 8B: a square number")
    parser.add_argument("--folder", help="where to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        root = Path(place)
        parameters = write_model(root / "hf", args.scale)
        print(f"{parameters / 1e9:.2f} B parameters, {len(list((root / 'hf').glob('*.safetensors')))} shards")
        own = [f"output_dir={root / 'out'}", "precision=bf16"]
        there = convert(*own, "job.to=sharded", f"model.weights={root / 'hf'}", f"job.out={root / 'sharded'}")
        report("to sharded", Measured(*there, largest(root / "hf")))
        back = convert(*own, "job.to=hf", f"job.source={root / 'sharded'}", f"job.out={root / 'back'}")
        report("to hf", Measured(*back, largest(root / "hf")))


def report(name: str, measured: Measured) -> None:
    peak, limit, file = (x / 1e9 for x in (measured.peak_bytes, measured.limit, measured.largest_file))
    print(
        f"{name}: {measured.seconds:.0f} s, {peak:.2f} GB anonymous, limit {limit:.2f} GB (largest file {file:.2f} GB)"
    )


if __name__ == "__main__":
    main()
