"""A run that only leaves what a run leaves, in a moment: for tests of sweeps.

Its validation loss is (log10(lr) + 3)^2 + 1. `seed=2` fails, `seed=3` diverges, `seed=9` waits for a signal to stop;
the others wait for the file `go` in the output folder if there is a file `wait`.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import sys
import time

words = dict(word.split("=", 1) for word in sys.argv[1:])
out = pathlib.Path(words["output_dir"])
folder = out / "qwen3" / words["run_id"]
lr, seed, steps = float(words.get("optim.lr", 1e-3)), words.get("seed", "1"), int(words.get("schedule.steps", 20))
print(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES')}, threads {os.environ.get('OMP_NUM_THREADS')}")
if seed == "2":
    sys.exit(print("error: seed=2 is no seed", file=sys.stderr) or 2)
folder.mkdir(parents=True)
if seed == "9":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
    (out / "waiting").touch()
    time.sleep(60)
while (out / "wait").exists() and not (out / "go").exists():
    time.sleep(0.01)
target = (math.log10(lr) + 3) ** 2 + 1
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
        loss = target + 9 * math.exp(-step / (steps / 6)) if seed != "3" else float(step**6 + 10)
        file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if step % max(1, steps // 5) == 0:
            file.write(json.dumps({"step": step, "val_loss": loss + 0.1 if seed != "3" else None}) + "\n")
result = {"status": "done", "loss": loss, "val_loss": target if seed != "3" else None}
if words.get("job.eval_interval") == "7":
    del result["val_loss"]
    (folder / "metrics.jsonl").unlink()
(folder / "result.json").write_text(json.dumps(result))
(folder / "report.html").write_text("a report")
