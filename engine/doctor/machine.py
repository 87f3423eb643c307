"""The machine without torch: which plugins see their hardware and why, cores, memory, disk, shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.doctor.report import Finding
from engine.schema import Hardware as HardwareSettings
from engine.schema import Launcher, Run
from hardware import registry
from hardware.base import Hardware, HardwareError
from hardware.host import usable_cores

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_DISK, SOME_DISK = GIB // 4, 10 * GIB  # below the first nothing useful fits; a small model's run takes some GiB
SOME_SHARED = GIB  # a container's default is 64 MiB; ranks and data loaders exchange more


def detections(chosen: Hardware) -> Iterator[Finding]:
    """What every plugin says of its hardware; that of `chosen` must be there."""
    for name in (*registry.PLUGINS, *registry.outside()):
        own = name == chosen.name
        try:
            found = (chosen if own else registry.plugin(name)).detect()
        except Exception as error:  # another package's code may do anything
            known = isinstance(error, HardwareError)
            words = str(error) if known else f"cannot look for its hardware: {type(error).__name__}: {error}"
            yield Finding("hardware", name, "fail" if own else "warn", words)
            continue
        if own:
            state, there = ("ok", "chosen") if found.available else ("fail", "not on this machine")
        else:
            state, there = "-", "there" if found.available else "not there"
        yield Finding("hardware", name, state, f"{there}: {found.why}")


def obstacles(hardware: Hardware) -> Iterator[Finding]:
    """What the plugin would refuse a plain run of one rank for."""
    run = Run(hardware=HardwareSettings(name=hardware.name), launcher=Launcher(name="local"))
    try:
        hardware.configure(run)
    except HardwareError as error:
        for line in str(error).splitlines():
            yield Finding("hardware", "set-up", "fail", line)


def host_findings(output_dir: Path) -> Iterator[Finding]:
    """Cores, memory, and the file systems that runs write to."""
    import psutil

    yield Finding("host", "cores", "-", str(usable_cores()))
    memory = psutil.virtual_memory()
    yield Finding("host", "memory", "-", f"{_gib(memory.available)} of {_gib(memory.total)} are free")
    yield _disk(output_dir)
    if SHARED_MEMORY.is_dir():
        yield _shared_memory()


def _disk(output_dir: Path) -> Finding:
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Finding("host", "disk", "fail", f"{folder} cannot be written to; output_dir=DIR names another place")
    free = shutil.disk_usage(folder).free
    words = f"{_gib(free)} are free in {folder}"
    if free < LEAST_DISK:
        return Finding("host", "disk", "fail", f"{words}; output_dir=DIR names another place")
    if free < SOME_DISK:
        return Finding("host", "disk", "warn", f"{words}; a checkpoint takes 12 bytes a parameter, and two are kept")
    return Finding("host", "disk", "ok", words)


def _shared_memory() -> Finding:
    usage = shutil.disk_usage(SHARED_MEMORY)
    words = f"{_gib(usage.free)} of {_gib(usage.total)} are free in {SHARED_MEMORY}"
    if usage.free < SOME_SHARED:
        advice = "several ranks on one machine may fail; give a container more with --shm-size=16g"
        return Finding("host", "shared memory", "warn", f"{words}; {advice}")
    return Finding("host", "shared memory", "ok", words)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
