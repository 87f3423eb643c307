"""The loss of the fast path (bf16, compiled, with the hardware's kernels) against that of plain fp32, on real text.

    python -m bench.fast_path_loss                                  # 200 steps of a model of 113 million parameters
    python -m bench.fast_path_loss --steps 20 model=tiny data.seq_len=64 data.global_batch_size=4   # a quick look

Each side is a run of `python -m zoo.qwen3` on the standard library's source text, same seed and samples; settings given
here go to all of them. Wanted: within 0.5% at every 20th step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = [
    *("model.hidden_size=1024", "model.intermediate_size=3072", "model.num_hidden_layers=8", "model.head_dim=128"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=8", "data.seq_len=1024", "data.global_batch_size=16"),
    *("data.micro_batch_size=16", "optim.lr=6e-4"),
]
REFERENCE = ["backend=native", "precision=fp32", "precision.tf32=false", "precision.compile=false"]
FAST = {backend: [f"backend={backend}", "precision=bf16"] for backend in ("native", "megatron")}


def losses(name: str, words: list[str], place: Path) -> list[float]:
    """The loss of every step of one run."""
    output = [f"output_dir={place}", f"run_id={name}", "parallelism=single", "checkpoint.export_hf=false"]
    subprocess.run([sys.executable, "-m", "zoo.qwen3", *words, *output], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (place / "qwen3" / name / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    args, words = parser.parse_known_args()
    common = [*(words or MODEL), f"schedule.steps={args.steps}", f"schedule.warmup_steps={args.steps // 10}"]
    common += ["job.eval_rows=2", f"job.eval_interval={args.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        reference = losses("fp32", [*REFERENCE, *common], place)
        fast = {name: losses(name, [*own, *common], place) for name, own in FAST.items()}
    print("step  fp32 loss  " + "  ".join(f"{name:>9} differs" for name in fast))
    for step in range(19, len(reference), 20):
        differences = (curve[step] / reference[step] - 1 for curve in fast.values())
        print(f"{step + 1:4}  {reference[step]:9.4f}  " + "  ".join(f"{100 * d:16.3f}%" for d in differences))


if __name__ == "__main__":
    main()
