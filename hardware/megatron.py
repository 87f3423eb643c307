"""How a hardware plugin makes megatron-core, as it comes from its package, run on its devices.

An adapter is a table of rebindings, each with its reason. `apply` imports what the backend uses of megatron-core and
carries the table out; `revert` restores every symbol. A target that the installed megatron-core does not have is a
HardwareError: a rebinding that silently misses would show up as a wrong device or a wrong number much later.
"""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Optional, Protocol

from hardware.base import HardwareError

Undo = Callable[[], None]

# What the Megatron backend reaches, directly or through imports that megatron-core makes inside functions.
MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.models.mimo.model.base",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.tensor_parallel.random",
)


class Rebinding(Protocol):
    """A row of an adapter's table."""

    reason: str

    def apply(self) -> Undo:
        """Rebind; the returned function puts back what was there. HardwareError if the target does not exist."""


@dataclass(frozen=True)
class Attribute:
    """`module:dotted.name` becomes `value`."""

    target: str
    value: Any
    reason: str

    def apply(self) -> Undo:
        owner, name, old = resolve(self.target)
        setattr(owner, name, self.value)
        return lambda: setattr(owner, name, old)


@dataclass(frozen=True)
class Everywhere:
    """The object `module:dotted.name` becomes `make(object)`, also in every module that holds a copy, by any name."""

    target: str
    make: Callable[[Any], Any]
    reason: str

    def apply(self) -> Undo:
        owner, name, old = resolve(self.target)
        new = self.make(old)
        modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        held = {
            (id(place), key): (place, key)
            for place in modules
            for key, value in list(vars(place).items())
            if value is old
        }
        held[id(owner), name] = (owner, name)
        for place, key in held.values():
            setattr(place, key, new)

        def undo() -> None:
            for place, key in held.values():
                setattr(place, key, old)

        return undo


@dataclass(frozen=True)
class Recode:
    """A function's code with some constants or attribute names exchanged, in place.

    In place, so that copies of the function under other names change too, and nothing outside the function does.
    """

    target: str
    reason: str
    constants: tuple[tuple[str, str], ...] = ()
    names: tuple[tuple[str, str], ...] = ()

    def apply(self) -> Undo:
        function = _plain_function(resolve(self.target)[2])
        old = function.__code__
        swap_constants, swap_names = dict(self.constants), dict(self.names)
        consts = tuple(_swap(constant, swap_constants) for constant in old.co_consts)
        names = tuple(swap_names.get(name, name) for name in old.co_names)
        if (swap_constants and consts == old.co_consts) or (swap_names and names == old.co_names):
            raise HardwareError(f"megatron-core's {self.target} no longer holds what the adapter replaces in it")
        function.__code__ = old.replace(co_consts=consts, co_names=names)
        return lambda: setattr(function, "__code__", old)


@dataclass(frozen=True)
class ModuleGlobal:
    """The global `name` of every loaded megatron-core module that refers to `old` becomes `new`."""

    name: str
    old: Any
    new: Any
    reason: str

    def apply(self) -> Undo:
        found = [module for module in loaded() if vars(module).get(self.name) is self.old]
        if not found:
            raise HardwareError(f"no megatron-core module has the global '{self.name}' that the adapter replaces")
        for module in found:
            setattr(module, self.name, self.new)

        def undo() -> None:
            for module in found:
                setattr(module, self.name, self.old)

        return undo


@dataclass(frozen=True)
class Uncompiled:
    """Functions that megatron-core passes to torch.compile run as they were written."""

    reason: str

    def apply(self) -> Undo:
        swapped = []
        for owner in _owners():
            for name, value in list(vars(owner).items()):
                plain = getattr(value, "_torchdynamo_orig_callable", None)
                if isinstance(value, types.FunctionType) and plain is not None:
                    setattr(owner, name, plain)
                    swapped.append((owner, name, value))

        def undo() -> None:
            for owner, name, value in swapped:
                setattr(owner, name, value)

        return undo


@dataclass(frozen=True)
class Silenced:
    """Warnings that begin with one of `messages`, and megatron-core's log lines below errors, are not shown."""

    messages: tuple[str, ...]
    reason: str

    def apply(self) -> Undo:
        logger, filters = logging.getLogger("megatron"), warnings.filters
        level, before = logger.level, list(filters)
        logger.setLevel(logging.ERROR)
        for message in self.messages:
            warnings.filterwarnings("ignore", message)
        added = [entry for entry in filters if entry not in before]

        def undo() -> None:
            logger.setLevel(level)
            filters[:] = [entry for entry in filters if entry not in added]

        return undo


NOISE = Silenced(
    ("The .grad attribute of a Tensor that is not a leaf", "full scope is deprecated"),
    "the distributed optimizer works on views of parameters, and configs mention a default of their own as deprecated",
)


def group_without_warning(group_or_default: Callable[..., Any]) -> Callable[..., Any]:
    """The default group where none is given."""
    from megatron.core import parallel_state

    def call(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        if tp_group is not None or not parallel_state.is_initialized():
            return tp_group
        kind = "expert_tensor_parallel" if is_expert else "tensor_model_parallel"
        return getattr(parallel_state, f"get_{kind}_group")(check_initialized=check_initialized)

    return call


class MegatronAdapter:
    """The adapter of hardware that megatron-core knows."""

    modules: ClassVar[Sequence[str]] = MODULES
    # Of the process, not of an instance: there is one megatron-core, and every caller gets its own adapter.
    _undo: ClassVar[Optional[list[Undo]]] = None

    def table(self) -> list[Rebinding]:
        """What to rebind, in order. Called after the imports."""
        return [
            NOISE,
            Everywhere(
                "megatron.core.utils:get_tensor_model_parallel_group_if_none",
                group_without_warning,
                "rank 0 warns whenever a layer asks for the default group, and a warning ends a compiled graph",
            ),
        ]

    def apply(self) -> None:
        """Import megatron-core and carry out the table. Does nothing if that is done already."""
        kind = type(self)
        if kind._undo is not None:
            return
        with quiet():
            for module in self.modules:
                import_module(module)
        kind._undo = []
        try:
            for row in self.table():
                kind._undo.append(row.apply())
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put back everything that `apply` rebound, in reverse order."""
        kind = type(self)
        while kind._undo:
            kind._undo.pop()()
        kind._undo = None


@contextmanager
def quiet() -> Iterator[None]:
    """Without what importing megatron-core says: that TE, Apex or a device are absent, and some of its syntax."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def loaded() -> list[types.ModuleType]:
    """The megatron-core modules imported so far."""
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("megatron.core") and module]


def _owners() -> list[Any]:
    """Loaded modules and the classes defined in them."""
    modules = loaded()
    names = {module.__name__ for module in modules}
    classes = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ in names
    }
    return [*modules, *classes.values()]


def resolve(target: str) -> tuple[Any, str, Any]:
    """Owner, name and raw value (descriptors unbound) of `module:dotted.name`."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner = import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, vars(owner)[name]
    except (ImportError, AttributeError, KeyError):
        raise HardwareError(f"the installed megatron-core has no {target}, which the adapter rebinds") from None


def _plain_function(value: Any) -> types.FunctionType:
    """The function inside a classmethod, a staticmethod or a decorator that keeps `__wrapped__`."""
    while not isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value.__wrapped__
    return value


def _swap(constant: Any, swap: dict[str, str]) -> Any:
    if isinstance(constant, tuple):
        return tuple(_swap(item, swap) for item in constant)
    return swap.get(constant, constant) if isinstance(constant, str) else constant
