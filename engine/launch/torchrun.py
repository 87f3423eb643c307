"""`launcher=torchrun`: this node's ranks of a run over several nodes, through torch's own launcher."""

from __future__ import annotations

import re
import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path

from engine.faults.board import Board
from engine.launch.local import free_port, start, worker_environment
from engine.launch.supervise import Worker, supervise
from engine.launch.verdict import Verdict, failure, settle
from engine.launch.watchdog import Watchdog
from engine.rundir import RunFolder
from engine.schema import Run
from hardware.base import Hardware

FAILURE = re.compile(r"time +: (?P<time>\S+)\n.*\n +rank +: (?P<rank>\d+) .*\n +exitcode +: (?P<code>-?\d+) ")
SAME = timedelta(seconds=1)  # torchrun's clock: of two ranks that end together it calls the lower one the root cause


def torchrun_command(run: Run, config: str, address: str | None = None) -> list[str]:
    """The command of this node; its first three words are what `torchrun` stands for."""
    launcher = run.launcher
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={launcher.nodes}",
        f"--nproc-per-node={launcher.nproc_per_node}",
        f"--node-rank={launcher.node_rank or 0}",
        f"--master-addr={address or launcher.master_addr}",
        f"--master-port={launcher.master_port or free_port()}",
        *("-m", "engine.worker", config),
    ]


def launch(run: Run, folder: RunFolder, hardware: Hardware) -> int:
    """Start this node's ranks and wait for them. The exit status of the run."""
    from engine.launch.show import common_environment

    nproc = run.launcher.nproc_per_node or 1
    environment = worker_environment(hardware, 0, nproc)
    for key in hardware.launch_env(0, nproc).keys() - common_environment(hardware, nproc).keys():
        # A value of its own for each rank cannot come from the environment that they share.
        environment.pop(key)
    board, log = Board(nproc), folder.logs(0).with_name(f"torchrun_{run.launcher.node_rank or 0}.log")
    log.unlink(missing_ok=True)
    command = torchrun_command(run, str(folder.config))
    process = start(command, environment | board.environment(), folder.lock, log, terminal=True)

    def ranks() -> list[int]:
        return [seen.pid for seen in board.seen() if not seen.note]

    worker = Worker("torchrun", process, log, ranks)
    verdict = supervise([worker], board, Watchdog(board, run.faults.timeout_s, folder.path / "logs"))
    board.close()
    return settle(_root_cause(log) or verdict if verdict.status == 1 else verdict, run, folder)


def _root_cause(log: Path) -> Verdict | None:
    """The rank that torchrun saw killed first, if that is how it began; what ranks say of themselves is better else.

    It ends the others with SIGTERM, and after 30 s with SIGKILL, and lists them too.
    """
    text = log.read_text(errors="replace") if log.is_file() else ""
    seen = [(datetime.strptime(f["time"], "%Y-%m-%d_%H:%M:%S"), f) for f in FAILURE.finditer(text)]
    if not seen:
        return None
    latest = min(time for time, _ in seen) + SAME
    for time, found in seen:
        number = -int(found["code"])
        if number > 0 and number != signal.SIGTERM and time <= latest:
            return failure(f"rank {found['rank']}", 128 + number, None, None)
    return None
