"""`launcher=local`: all ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import engine
from engine.errors import UserError
from engine.faults.board import Board
from engine.launch.supervise import Worker, die_with_parent, supervise
from engine.launch.verdict import settle
from engine.launch.watchdog import Watchdog
from engine.rundir import RunFolder
from engine.schema import Run
from hardware.base import Hardware

PORTS = range(15000, 30000)


def launch(run: Run, folder: RunFolder, hardware: Hardware) -> int:
    """Start the ranks; rank 0 has the terminal, the others write to logs/. The exit status of the run."""
    world = run.launcher.nproc_per_node or 1
    port = run.launcher.master_port or free_port()
    workers: list[Worker] = []
    board = Board(world)
    command = [sys.executable, "-m", "engine.worker", str(folder.config)]
    for rank in range(world):
        environment = (
            worker_environment(hardware, rank, world)
            | board.environment()
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": run.launcher.master_addr,
                "MASTER_PORT": str(port),
            }
        )
        log = folder.logs(rank) if rank else None
        workers.append(Worker(f"rank {rank}", start(command, environment, folder.lock, log), log))
    verdict = supervise(workers, board, Watchdog(board, run.faults.timeout_s, folder.path / "logs"))
    board.close()
    return settle(verdict, run, folder)


def start(
    command: list[str], environment: dict[str, str], lock: int, log: Path | None, terminal: bool = False
) -> subprocess.Popen[bytes]:
    """A process that holds the run's lock and ends with this one. Without a log it has the terminal.

    With a log and `terminal` only its errors go to the log.
    """
    output = log.open("ab") if log else None
    try:
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL if log else None,
            stdout=None if terminal else output,
            stderr=output,
            preexec_fn=die_with_parent,
        )
    finally:
        if output:
            output.close()


def worker_environment(hardware: Hardware, local_rank: int, nproc: int) -> dict[str, str]:
    """This process's environment, what the hardware wants, and the place that Zooforge is imported from."""
    root = str(Path(engine.__file__ or "").parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, **hardware.launch_env(local_rank, nproc)}
    return environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the system hands out.

    Of those another process may be given the same before rank 0 listens; two runs that start together had one store.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no TCP port from {PORTS[0]} to {PORTS[-1]} is free; name one: launcher.master_port=...")
