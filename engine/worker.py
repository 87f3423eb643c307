"""One rank: a frozen config in, a job run. Never imports Hydra.

    python -m engine.worker RUN_DIR/config.yaml

Exit status: 0 done, 2 a user's mistake (one line on stderr), 75 interrupted after saving, anything else a bug. Under a
launcher of Zooforge a rank tells it why it ends, and the launcher, which sees all ranks, says which was the cause.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EXIT_INTERRUPTED, EXIT_USER, Interrupted, OtherRank, UserError
from engine.family import load_dotted
from engine.faults.board import VARIABLE, Page
from engine.faults.retry import READS
from engine.faults.stacks import rank_log
from engine.freeze import load_run
from engine.launch.supervise import signal_at_parents_end
from engine.outlet import lasting_output
from engine.schema import Run
from hardware.base import Hardware, HardwareError

if TYPE_CHECKING:
    from engine.context import Context

# By dotted name, so that the engine imports no job of the shelves above it.
JOBS = {
    "train": "engine.jobs.train:run",
    "forward": "engine.jobs.forward:run",
    "convert": "engine.jobs.convert:run",
    "prepare": "engine.jobs.prepare:run",
    "sample": "engine.jobs.sample:run",
    "eval": "eval.jobs:evaluation",
    "serve": "eval.jobs:serving",
}

# What gloo, NCCL and the store of torch.distributed say when the other side has gone.
LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Timed out waiting")


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
    page = Page.open(int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")))
    context: Context | None = None
    status, code, message = "done", 0, None
    try:
        hardware.bootstrap()  # before torch, which a runtime may have to patch while it is imported
        from engine.context import Context

        context = Context(run, config.parent, hardware, page)
        READS.begin(run.faults.read_retries, context.log)
        load_dotted(JOBS[run.job.name])(context)
        context.close()
    except Interrupted as stop:
        status, code, message = "interrupted", EXIT_INTERRUPTED, str(stop)
        page.tell(code, message)
        context.close()
    except Exception as error:
        status = "failed"
        code, message = _explained(error, run, hardware)
        _report(page, code, message, config.parent, consequence=_lost_a_peer(error))
    if context is not None and context.rank == 0 and not _refused(code, context):
        summary = {"status": status, "job": run.job.name, "family": run.family, "seconds": time.time() - started}
        write_result(config.parent, summary | ({"message": message} if message else {}) | context.result)
        for action in context.after_result:
            action(config.parent)
    return code


def _explained(error: Exception, run: Run, hardware: Hardware) -> tuple[int, str]:
    """The exit status that an error means, and one line for the user."""
    if isinstance(error, (UserError, HardwareError)):
        return EXIT_USER, str(error)
    if hardware.is_out_of_memory(error):
        return EXIT_USER, out_of_memory_message(run, hardware, error)
    return 1, f"{type(error).__name__}: {error}"


def _lost_a_peer(error: Exception) -> bool:
    """Whether this is only what a rank sees when another has ended."""
    text = str(error)
    return isinstance(error, OtherRank) or (isinstance(error, RuntimeError) and any(part in text for part in LOST))


def _report(page: Page, code: int, message: str, run_dir: Path, consequence: bool) -> None:
    """Tell the launcher how this rank fails, or the user where there is none. Called in the handler of the error."""
    text = traceback.format_exc() if code != EXIT_USER else f"error: {message}\n"
    if not page.watched:
        print(text, end="", file=sys.stderr, flush=True)
        return
    page.tell(code, message, text, consequence)
    if code != EXIT_USER:
        # Most often this rank only lost one that failed: what it saw belongs into its log, not on the terminal.
        with rank_log(run_dir, page.rank).open("a") as log:
            log.write(text)


def _refused(code: int, context: Context) -> bool:
    """Whether a run that was there before was not even taken up: its result and report stay as they are."""
    return code not in (0, EXIT_INTERRUPTED) and not context.began and (context.run_dir / "result.json").exists()


def main() -> None:
    """Entry point of `python -m engine.worker`."""
    warnings.filterwarnings("ignore")
    lasting_output()
    if os.environ.get(VARIABLE):
        # Started through torchrun, too, a rank must not outlive the launcher of Zooforge.
        signal_at_parents_end(signal.SIGKILL)
    code = run_job(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A failed rank must not wait in a collective's or a thread's exit handler for ranks that are gone.
        os._exit(code)


if __name__ == "__main__":
    main()
