"""`launcher=torchrun`: this node's ranks of a run over several nodes, through torch's own launcher."""

from __future__ import annotations

import json
import sys

from engine.errors import EXIT_INTERRUPTED
from engine.launch.local import start, worker_environment
from engine.launch.supervise import Worker, supervise
from engine.rundir import RunFolder
from engine.schema import Run
from hardware.base import Hardware


def torchrun_command(run: Run, config: str, address: str | None = None) -> list[str]:
    """The command of this node; its first three words are what `torchrun` stands for."""
    launcher = run.launcher
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={launcher.nodes}",
        f"--nproc-per-node={launcher.nproc_per_node}",
        f"--node-rank={launcher.node_rank or 0}",
        f"--master-addr={address or launcher.master_addr}",
        f"--master-port={launcher.master_port}",
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
    process = start(torchrun_command(run, str(folder.config)), environment, folder.lock, None)
    status = supervise([Worker("torchrun", process)])
    return EXIT_INTERRUPTED if status and _interrupted(folder) else status


def _interrupted(folder: RunFolder) -> bool:
    """Whether the ranks saved and stopped: torchrun makes 1 of every status that is not 0."""
    result = folder.path / "result.json"
    try:
        fresh = result.stat().st_mtime >= folder.started
        return fresh and json.loads(result.read_text()).get("status") == "interrupted"
    except (OSError, ValueError):
        return False
