"""megatron-core on a machine without accelerators, over gloo.

megatron-core writes its device into the code: `torch.cuda.current_device()`, `device="cuda"`, streams, events and a
random number generator of the device. Here its own modules see a `torch` whose device layer answers for the CPU; the
rest of the process keeps the real one. What goes through a tensor's method cannot be caught so and is rewritten in
the few functions that do it. Each row of the table says what for.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch

from hardware.cpu.uneven import gathering, scattering
from hardware.megatron import Attribute, MegatronAdapter, ModuleGlobal, Rebinding, Recode, Uncompiled, resolve

CPU = torch.device("cpu")
FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace")
FACTORIES += ("ones", "ones_like", "rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like")
OPTIMIZER = "megatron.core.optimizer."
MAPPINGS = "megatron.core.tensor_parallel.mappings:"
CPU_TYPES = tuple(
    (f"torch.cuda.{dtype}", f"torch.{dtype}") for dtype in ("FloatTensor", "HalfTensor", "BFloat16Tensor")
)


class CpuMegatron(MegatronAdapter):
    """The table for the CPU."""

    def table(self) -> list[Rebinding]:
        types_reason = "parameters and gradients are recognised by the name of their CUDA tensor type"
        return [
            *super().table(),
            ModuleGlobal("torch", torch, TorchOnCpu(), "devices, streams, events and the device's random numbers"),
            Attribute(
                "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
                set_rng_state,
                "goes to the CUDA generators below torch.cuda's functions",
            ),
            Recode(
                "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
                "the copy of tied embeddings on the last pipeline stage is moved with Tensor.cuda()",
                names=(("cuda", "cpu"),),
            ),
            ModuleGlobal(
                "maybe_move_tensor_to_cpu",
                resolve("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu")[2],
                already_here,
                "the sizes of what experts exchange become plain numbers only on their way from a device",
            ),
            *(
                Attribute(target, wrap(resolve(target)[2]), "gloo exchanges equal shares only")
                for target, wrap in (
                    (MAPPINGS + "_gather_along_first_dim", gathering),
                    (MAPPINGS + "_reduce_scatter_along_first_dim", scattering),
                )
            ),
            Recode(OPTIMIZER + "clip_grads:clip_grad_by_total_norm_fp32", types_reason, constants=CPU_TYPES),
            Recode(
                OPTIMIZER + "optimizer:Float16OptimizerWithFloat16Params.__init__", types_reason, constants=CPU_TYPES
            ),
            Recode(OPTIMIZER + "distrib_optimizer:DistributedOptimizer.__init__", types_reason, constants=CPU_TYPES),
            Recode(
                OPTIMIZER + "distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
                types_reason,
                constants=CPU_TYPES,
            ),
            Uncompiled("compiling small fused functions costs a CPU more time than it saves, and needs a compiler"),
        ]


def set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """Stands in for a device generator's: the CPU generator takes the state."""
    torch.default_generator.set_state(state)


def already_here(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stands in for a copy from the device to the host: as an array where it is asked for."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def here() -> torch.device:
    """The CPU, unless a model is being made without memory."""
    default = torch.get_default_device()
    return default if default.type == "meta" else CPU


def is_accelerator(device: Any) -> bool:
    """Does a `device=` argument mean the accelerator? A bare number is its index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that makes on the CPU what is asked of the accelerator, unpinned: pinning needs a driver."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_accelerator(kwargs.get("device")):
            kwargs["device"] = here()
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class TorchOnCpu(types.ModuleType):
    """`torch`, except for its device layer and its factories."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = CudaOnCpu()
        for name in FACTORIES:
            setattr(self, name, on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Stream:
    """A queue of one: everything has happened when a call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Event:
    """Something that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Ranges:
    """`torch.cuda.nvtx`, marking nothing."""

    def range_push(self, message: str) -> None:
        pass

    def range_pop(self) -> None:
        pass


class CudaOnCpu:
    """The part of `torch.cuda` that megatron-core calls. Anything else, types above all, is the real one's."""

    Stream = Stream
    Event = Event
    nvtx = _Ranges()
    default_generators = (torch.default_generator,)

    def __init__(self) -> None:
        self.random = self  # torch.cuda.random repeats the generator's functions
        self._stream = Stream()

    def current_device(self) -> torch.device:
        return here()

    def is_available(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    def default_stream(self, device: Any = None) -> Stream:
        return self._stream

    def stream(self, stream: Stream) -> AbstractContextManager[Stream]:
        return nullcontext(stream)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)
