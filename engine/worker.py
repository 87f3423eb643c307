"""One rank: a frozen config in, a job run. Never imports Hydra.

    python -m engine.worker RUN_DIR/config.yaml

Exit status: 0 done, 2 a user's mistake (one line on stderr), 75 interrupted after saving, anything else a bug.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from engine.errors import EXIT_INTERRUPTED, EXIT_USER, Interrupted, UserError
from engine.family import load_dotted
from engine.freeze import load_run
from engine.schema import Run
from hardware.base import Hardware, HardwareError

# By dotted name, so that the engine imports no job of the shelves above it.
JOBS = {
    "train": "engine.jobs.train:run",
    "forward": "engine.jobs.forward:run",
    "convert": "engine.jobs.convert:run",
    "prepare": "engine.jobs.prepare:run",
    "sample": "engine.jobs.sample:run",
}


def out_of_memory_message(run: Run, hardware: Hardware, error: BaseException) -> str:
    """What was allocated, and which settings would help, dearest first."""
    hints = []
    if run.data.micro_batch_size > 1:
        hints.append(f"data.micro_batch_size={max(1, run.data.micro_batch_size // 2)}")
    if run.parallelism.recompute != "full":
        hints.append("parallelism.recompute=full")
    if run.precision.name == "fp32":
        hints.append("precision=bf16")
    hints.append("a shorter data.seq_len" if run.parallelism.tp > 1 or run.backend == "native" else "parallelism.tp=2")
    detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"out of device memory: {detail} ({hardware.memory_report()}); what would help: {', '.join(hints)}"


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    """`result.json`, replaced in one move."""
    temporary = run_dir / "result.json.tmp"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(run_dir / "result.json")


def run_job(config: Path) -> int:
    """Run the job of a frozen config on this rank; the exit status."""
    from hardware import registry

    run = load_run(config)
    started = time.time()
    hardware = registry.get(run.hardware.name)
    hardware.bootstrap()
    from engine.context import Context

    context = Context(run, config.parent, hardware)
    status, code, message = "done", 0, None
    try:
        load_dotted(JOBS[run.job.name])(context)
        context.close()
    except Interrupted as stop:
        status, code, message = "interrupted", EXIT_INTERRUPTED, str(stop)
        context.close()
    except (UserError, HardwareError) as error:
        status, code, message = "failed", EXIT_USER, str(error)
    except Exception as error:
        status, code, message = "failed", 1, f"{type(error).__name__}: {error}"
        if hardware.is_out_of_memory(error):
            code, message = EXIT_USER, out_of_memory_message(run, hardware, error)
        else:
            traceback.print_exc()
    if code == EXIT_USER:
        print(f"error: {message}", file=sys.stderr, flush=True)
    if context.rank == 0:
        summary = {"status": status, "job": run.job.name, "family": run.family, "seconds": time.time() - started}
        write_result(config.parent, summary | ({"message": message} if message else {}) | context.result)
        for action in context.after_result:
            action(config.parent)
    return code


def main() -> None:
    """Entry point of `python -m engine.worker`."""
    warnings.filterwarnings("ignore")
    code = run_job(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A failed rank must not wait in a collective's or a thread's exit handler for ranks that are gone.
        os._exit(code)


if __name__ == "__main__":
    main()
