"""Finding a hardware plugin by name, or the first one that this machine has. Free of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware.base import CONTRACT_VERSION, Hardware, HardwareError, one_line

PLUGINS = {
    "kunlun": "hardware.kunlun:Kunlun",
    "nvidia": "hardware.nvidia:Nvidia",
    "cpu": "hardware.cpu:Cpu",
}
ENTRY_POINTS = "zooforge.hardware"  # plugins of other packages: name = module:Class


def get(name: str = "auto") -> Hardware:
    """The plugin `name`, or for "auto" the first in `order` whose hardware is here.

    Raises HardwareError for a name that nobody knows, and for hardware that is not here: there is no silent fallback.
    """
    if name == "auto":
        for plugin in order():
            if plugin.detect().available:
                return plugin
        raise HardwareError("no hardware found; the plugins here are " + ", ".join(PLUGINS))  # unreachable with a CPU
    plugin = _load(name)
    found = plugin.detect()
    if not found.available:
        raise HardwareError(f"hardware={name} is not on this machine: {found.why}; hardware=auto takes what is here")
    return plugin


def plugin(name: str) -> Hardware:
    """The plugin `name`, whether its hardware is here or not: for commands that are only printed."""
    return _load(name)


def order() -> list[Hardware]:
    """Every plugin as `auto` asks them.

    First those that present themselves as CUDA, since NVIDIA's would take their devices for its own; the CPU last.
    Those of Zooforge go before those of other packages.
    """
    plugins = [_load(name) for name in (*PLUGINS, *outside())]
    return sorted(plugins, key=lambda plugin: (plugin.name == "cpu", not plugin.presents_as_cuda))


def outside() -> dict[str, Any]:
    """Entry points of other packages by name, which may not be a built-in plugin's."""
    return _outside(tuple(sys.path))


@lru_cache(maxsize=4)
def _outside(path: Sequence[str]) -> dict[str, Any]:
    # Asking importlib.metadata takes a tenth of a command's time, and hardly anybody has such a plugin.
    if not any(f"[{ENTRY_POINTS}]" in text for text in _entry_point_files(path)):
        return {}
    from importlib import metadata

    found = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    for name in sorted(found.keys() & {"auto", *PLUGINS}):
        raise HardwareError(f"{found[name].value} calls itself hardware={name}, which is taken; uninstall or rename it")
    return dict(sorted(found.items()))


def _entry_point_files(path: Sequence[str]) -> list[str]:
    files = [file for folder in path for file in Path(folder or ".").glob("*.*-info/entry_points.txt")]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def _load(name: str) -> Hardware:
    if name in PLUGINS:
        module, _, attribute = PLUGINS[name].partition(":")
        return getattr(import_module(module), attribute)()
    if name not in outside():
        raise HardwareError(_unknown(name, ["auto", *PLUGINS, *outside()]))
    entry = outside()[name]
    theirs = f"hardware={name} comes from {entry.value}"
    try:
        kind = entry.load()
    except Exception as error:  # of another package's code: whatever it is, the user needs to know whose
        raise HardwareError(f"{theirs}, which does not load: {one_line(error)}") from error
    contract = getattr(kind, "contract", None)
    if contract != CONTRACT_VERSION:
        said = "does not say which contract it keeps" if contract is None else f"keeps contract {contract}"
        raise HardwareError(f"{theirs}, which {said}; this Zooforge needs {CONTRACT_VERSION}")
    try:
        plugin = kind()
    except Exception as error:
        raise HardwareError(f"{theirs}, which cannot be made: {one_line(error)}") from error
    if not isinstance(plugin, Hardware) or plugin.name != name:
        raise HardwareError(f"{theirs}, which is no hardware.base.Hardware of that name")
    return plugin


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=2, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"hardware={name} is not known; {meant}Known: {', '.join(known)}"
