"""megatron-core on Kunlun: the vendor's own plugin patches it, and a version that it does not know is refused."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from hardware.base import HardwareError, one_line
from hardware.megatron import MegatronAdapter


class KunlunMegatron(MegatronAdapter):
    """The vendor's plugin, then megatron-core as it comes."""

    def apply(self) -> None:
        if type(self)._undo is None:
            start_plugin(version("megatron-core"))
        super().apply()


def start_plugin(megatron: str) -> None:
    """Start `xpu_plugin` or `xmegatron_ext`, whichever the image has. Raises HardwareError, one line."""
    if find_spec("xpu_plugin"):
        name, call, arguments = "xpu_plugin", "init_megatron_core_xpu_plugin", {}
    elif find_spec("xmegatron_ext"):
        name, call = "xmegatron_ext", "megatron_plugin_init"
        arguments = {"use_version": megatron, "check_version": True}
    else:
        raise HardwareError(
            "hardware=kunlun: backend=megatron needs the vendor's xpu_plugin or xmegatron_ext, and neither is "
            "installed; use the vendor's image, or backend=native"
        )
    try:
        getattr(import_module(name), call)(**arguments)
    except Exception as error:
        raise HardwareError(
            f"hardware=kunlun: {name} does not take megatron-core {megatron}: {one_line(error)}"
        ) from error
