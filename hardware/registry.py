"""Finding a hardware plugin by name, or the first one that this machine has. Free of torch."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from hardware.base import CONTRACT_VERSION, Hardware, HardwareError

# In the order of `auto`.
PLUGINS = {"nvidia": "hardware.nvidia:Nvidia", "cpu": "hardware.cpu:Cpu"}
ENTRY_POINTS = "zooforge.hardware"  # plugins of other packages, by name only


def entry_points(group: str) -> Any:
    """The entry points of a group; imported late, since most commands name no plugin of another package."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def get(name: str = "auto") -> Hardware:
    """The plugin `name`, or for "auto" the first of `PLUGINS` whose hardware is here.

    Raises HardwareError for a name that nobody knows, and for hardware that is not here: there is no silent fallback.
    """
    if name == "auto":
        for known in PLUGINS:
            plugin = _load(known)
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


def _load(name: str) -> Hardware:
    if name in PLUGINS:
        module, _, attribute = PLUGINS[name].partition(":")
        plugin = getattr(import_module(module), attribute)()
    else:
        outside = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
        if name not in outside:
            raise HardwareError(_unknown(name, ["auto", *PLUGINS, *outside]))
        plugin = outside[name].load()()
    if plugin.contract != CONTRACT_VERSION:
        theirs = f"the plugin of hardware={name} has contract {plugin.contract}"
        raise HardwareError(f"{theirs}; this Zooforge needs {CONTRACT_VERSION}")
    return plugin


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=2, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"hardware={name} is not known; {meant}Known: {', '.join(known)}"
