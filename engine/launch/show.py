"""`launcher=print`: the commands that would start a run, one line for each node."""

from __future__ import annotations

import shlex

from engine.cli import program
from engine.launch.torchrun import torchrun_command
from engine.resolve import model_ranks
from engine.rundir import run_folder
from engine.schema import Run
from hardware.base import Hardware

MASTER = "NODE0"  # stands for the first node's address where none is given


def commands(run: Run, hardware: Hardware, overrides: list[str]) -> str:
    """Lines for a shell: comments, and one command for each node with its environment."""
    layout, launcher = run.parallelism, run.launcher
    nproc, nodes = launcher.nproc_per_node or 1, launcher.nodes
    settings = {
        "run_id": str(run.run_id),
        "hardware": run.hardware.name,
        "launcher": "torchrun" if nodes > 1 else "local",
        "launcher.nproc_per_node": str(nproc),
    }
    address = launcher.master_addr
    if nodes > 1:
        if address in ("127.0.0.1", "localhost"):
            address = MASTER
        settings |= {
            "launcher.nodes": str(nodes),
            "launcher.master_addr": address,
            "launcher.master_port": str(launcher.master_port),
        }
    kept = [word for word in overrides if word.partition("=")[0] not in settings]
    kept = [word for word in kept if word.partition("=")[0] != "launcher.node_rank"]
    lines = [
        f"# {nodes * nproc} ranks: {nodes} node{'s' if nodes > 1 else ''} x {nproc}, "
        f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} ({model_ranks(layout)} ranks hold one model)",
        f"# the workers of {'node 0' if nodes > 1 else 'this node'}: {_workers(run, address)}",
    ]
    if address == MASTER:
        lines.append(f"# {MASTER} stands for the address of node 0; launcher.master_addr=... fills it in")
    if not any(word.startswith("hardware=") for word in overrides):
        lines.append(f"# hardware={run.hardware.name} is what this machine has; name that of the nodes, hardware=...")
    environment = [f"{key}={shlex.quote(value)}" for key, value in common_environment(hardware, nproc).items()]
    for node in range(nodes):
        words = [*kept, *(f"{key}={value}" for key, value in settings.items())]
        words += [f"launcher.node_rank={node}"] if nodes > 1 else []
        lines.append(" ".join([*environment, shlex.join([*program(run.family), *words])]))
    return "\n".join(lines)


def _workers(run: Run, address: str) -> str:
    config = str(run_folder(run) / "config.yaml")
    if run.launcher.nodes == 1:
        return f"python -m engine.worker {config} (RANK 0 to {(run.launcher.nproc_per_node or 1) - 1})"
    return shlex.join(["torchrun", *torchrun_command(run, config, address)[3:]])


def common_environment(hardware: Hardware, nproc: int) -> dict[str, str]:
    """What the hardware sets for every rank alike."""
    first = hardware.launch_env(0, nproc)
    last = hardware.launch_env(nproc - 1, nproc)
    return {key: value for key, value in first.items() if last.get(key) == value}
