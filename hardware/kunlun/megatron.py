"""megatron-core on Kunlun: the vendor's own plugin, then what this project's use of megatron-core could stumble over.

The vendor's plugin brings the chip's kernels into megatron-core; which of its names it changes is not public, and a
version that it does not know is refused. Rebindings that others make for parts that nothing here reaches (DeepEP's
buffers, megatron-core's own checkpoints, TransformerEngine's layers, graph capture) have no row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from typing import Any

from hardware.base import HardwareError, one_line
from hardware.megatron import Attribute, Everywhere, MegatronAdapter, Rebinding, resolve


class KunlunMegatron(MegatronAdapter):
    """The vendor's plugin, and the table for its cards."""

    def table(self) -> list[Rebinding]:
        from hardware.kunlun.means import REDUCE_SCATTER, MeansBySums, by_sum

        means = "the collective library has no mean; a sum is divided"
        return [
            *super().table(),
            MeansBySums(means),
            Attribute(REDUCE_SCATTER, by_sum(resolve(REDUCE_SCATTER)[2]), means),
            Everywhere(
                "megatron.core.pipeline_parallel.utils:set_streams",
                without_priority,
                "asking the runtime for the priorities of streams ends in an internal assertion",
            ),
            Everywhere(
                "megatron.core.parallel_state:get_nccl_options",
                no_options,
                "the options are those of NVIDIA's communicator, and the runtime's is another class",
            ),
        ]

    def apply(self) -> None:
        if type(self)._undo is None:
            start_plugin(version("megatron-core"))
        super().apply()


def without_priority(set_streams: Callable[..., None]) -> Callable[..., None]:
    """The function that makes streams, which all have the same priority."""
    known = signature(set_streams)

    @wraps(set_streams)
    def call(*args: Any, **kwargs: Any) -> None:
        given = known.bind(*args, **kwargs)
        given.arguments.pop("high_priority", None)
        set_streams(*given.args, **given.kwargs)

    return call


def no_options(get_options: Callable[..., Any]) -> Callable[..., None]:
    """No options for a process group, whatever was configured."""

    @wraps(get_options)
    def call(*args: Any, **kwargs: Any) -> None:
        return None

    return call


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
