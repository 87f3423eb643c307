"""`launcher=print`: the commands that would start a run, one line for each node."""

from __future__ import annotations

import shlex

from engine.cli import program
from engine.launch.torchrun import torchrun_command
from engine.resolve import model_ranks
from engine.rundir import run_folder
from engine.schema import Run
from engine.words import counted
from hardware.base import Hardware

MASTER = "NODE0"  # stands for the first node's address where none is given


def commands(run: Run, hardware: Hardware, overrides: list[str]) -> str:
    """Lines for a shell: comments, and one command for each node with its environment."""
    layout, launcher = run.parallelism, run.launcher
    nproc, nodes = launcher.nproc_per_node or 1, launcher.nodes
    chosen = any(word.startswith("hardware=") for word in overrides)
    settings = {
        "run_id": str(run.run_id),
        **({"hardware": run.hardware.name} if chosen else {}),
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
        f"# {counted(nodes * nproc, 'rank')}: {counted(nodes, 'node')} x {nproc}, "
        f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} ({_holders(model_ranks(layout), layout.ep * layout.etp)})",
        f"# the workers of {'node 0' if nodes > 1 else 'this node'}: {_workers(run, address)}",
    ]
    if address == MASTER:
        lines.append(f"# {MASTER} stands for the address of node 0; launcher.master_addr=... fills it in")
    if not chosen:
        lines.append("# each node uses the hardware that it finds; hardware=... names one, and its environment here")
    # What this machine would set says nothing of nodes whose hardware is not known.
    known = common_environment(hardware, nproc) if chosen else {}
    environment = [f"{key}={shlex.quote(value)}" for key, value in known.items()]
    for node in range(nodes):
        words = [*kept, *(f"{key}={value}" for key, value in settings.items())]
        words += [f"launcher.node_rank={node}"] if nodes > 1 else []
        lines.append(" ".join([*environment, shlex.join([*program(run.family), *words])]))
    return "\n".join(lines)


def _holders(ranks: int, of_experts: int) -> str:
    model = "each rank holds the whole model" if ranks == 1 else f"{ranks} ranks hold one model"
    return f"{model}, except that {of_experts} share its experts" if of_experts > 1 else model


def _workers(run: Run, address: str) -> str:
    config = str(run_folder(run) / "config.yaml")
    if run.launcher.nodes == 1:
        last = (run.launcher.nproc_per_node or 1) - 1
        return f"python -m engine.worker {config} ({f'RANK 0 to {last}' if last else 'RANK 0'})"
    return shlex.join(["torchrun", *torchrun_command(run, config, address)[3:]])


def common_environment(hardware: Hardware, nproc: int) -> dict[str, str]:
    """What the hardware sets for every rank alike."""
    first = hardware.launch_env(0, nproc)
    last = hardware.launch_env(nproc - 1, nproc)
    return {key: value for key, value in first.items() if last.get(key) == value}
