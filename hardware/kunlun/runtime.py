"""Bringing XPyTorch (`torch_xmlir`) up. Its patches fail silently, so what it should have done is verified."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hardware.base import HardwareError, one_line
from hardware.kunlun.environment import MARK, problems

PACKAGE = "torch_xmlir"
DOCTOR = f"python -m {PACKAGE} --doctor says more"
# What a healthy start prints: the collective library, and the patches of torch.
MARKERS = ("libbkcl.so loaded", "SYMBOL_REWRITE torch success")
TORCH = ("2.5", "2.9")  # versions of torch that the vendor has published it for
OTHER_TORCH = "ZOOFORGE_KUNLUN_TORCH"  # a version that is published later


def start() -> None:
    """Import the runtime before torch is used, and check that it is all there. Raises HardwareError, one line."""
    for problem in problems():
        raise HardwareError(problem)
    if MARK not in os.environ:
        raise HardwareError(
            f"hardware=kunlun: this process has not the runtime's environment ({MARK} is not set), which must be there "
            "before Python starts; start the run with its own launcher, or launcher=print shows the variables"
        )
    if find_spec(PACKAGE) is None:
        raise HardwareError(missing())
    runtime = sys.modules.get(PACKAGE) or _import()
    count = getattr(getattr(runtime, "_XMLIRC", None), "_xpu_get_devices_number", None)
    if count is None:
        raise _broken(f"{PACKAGE} has no _XMLIRC._xpu_get_devices_number")
    _check_torch(runtime)
    _check_devices(count)


def missing() -> str:
    """One line for cards without a runtime."""
    return (
        f"hardware=kunlun: the package {PACKAGE} (XPyTorch) is not installed in {sys.prefix}; "
        "it comes with the vendor's image, and no package index has it"
    )


def _import() -> Any:
    with _captured() as said:
        try:
            runtime = import_module(PACKAGE)
        except Exception as error:
            raise _broken(f"importing it fails with {one_line(error)}") from error
    for marker in MARKERS:
        if marker not in said[0]:
            raise _broken(f"its start did not print '{marker}'")
    return runtime


def _check_torch(runtime: Any) -> None:
    import torch

    version = ".".join(torch.__version__.split(".")[:2])
    known = (*TORCH, *filter(None, [os.environ.get(OTHER_TORCH)]))
    if version not in known:
        raise HardwareError(
            f"hardware=kunlun: {PACKAGE} {getattr(runtime, '__version__', '')} is published for torch "
            f"{' and '.join(known)}, and this is {torch.__version__}; install the vendor's, or if yours is newer than "
            f"this list set {OTHER_TORCH}={version}"
        )


def _check_devices(count: Any) -> None:
    import torch

    cards, seen = int(count()), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not cards or not seen:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f"CUDA_VISIBLE_DEVICES={chosen}" if chosen is not None else "xpu-smi shows what the driver sees"
        raise HardwareError(f"hardware=kunlun: no device is visible (runtime {cards}, torch {seen}); {hint}")
    if not torch.distributed.is_nccl_available():
        raise _broken("torch.distributed was not patched: it knows no accelerator's collectives")


def _broken(what: str) -> HardwareError:
    return HardwareError(f"hardware=kunlun: the runtime is only half installed: {what}; {DOCTOR}")


@contextmanager
def _captured() -> Iterator[list[str]]:
    """What is written to file descriptors 1 and 2, also by libraries; it is shown on stderr afterwards."""
    said = [""]
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            file.seek(0)
            said[0] = file.read().decode(errors="replace")
            sys.stderr.write(said[0])
