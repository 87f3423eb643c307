"""Which packages are installed, against what Zooforge asks for. Reads their metadata and imports none of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Optional

from engine.doctor.report import Finding
from hardware.kernels.registry import REFERENCES, Kernel, choose

if TYPE_CHECKING:
    from packaging.requirements import Requirement

REQUIRED = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy")
# Said where they are installed; what a kernel needs is a matter of the kernels' section.
OPTIONAL = ("triton", "liger-kernel", "transformer-engine", "flash-attn", "diffusers", "lerobot")
SECTION = "versions"
DTYPE = "bf16"  # fp32 always has the references


def version_findings() -> Iterator[Finding]:
    """Python, Zooforge and the packages that it is made of."""
    asked = _asked()
    yield Finding(SECTION, "python", "-", platform.python_version())
    yield Finding(SECTION, "zooforge", "-", _version("zooforge") or "from its source tree")
    for name in REQUIRED:
        yield _required(name, asked.get(name))
    for name in OPTIONAL:
        if found := _version(name):
            yield Finding(SECTION, name, "-", found)


def _required(name: str, asked: Optional[Requirement]) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(SECTION, name, "fail", f"not installed; Zooforge needs {asked or name}")
    if asked is not None and not asked.specifier.contains(found.partition("+")[0], prereleases=True):
        return Finding(SECTION, name, "warn", f"{found}; Zooforge is tested with {asked.specifier}")
    return Finding(SECTION, name, "ok", found)


def _asked() -> dict[str, Requirement]:
    """What Zooforge's own metadata asks for, by name; nothing where it runs from its source tree."""
    from packaging.requirements import Requirement

    try:
        lines = requires("zooforge") or []
    except PackageNotFoundError:
        return {}
    return {r.name: r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})}


def _version(name: str) -> Optional[str]:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernel_findings(offers: Sequence[Kernel]) -> Iterator[Finding]:
    """For each operation what computes it here, what stands in the way of a better one, and what that costs."""
    for operation in REFERENCES:
        choice = choose(operation, offers, DTYPE)
        if not choice.passed_over:
            yield Finding("kernels", operation, "ok", choice.kernel.name)
            continue
        cost = f"; by {choice.kernel.name} {choice.kernel.costs}" if choice.kernel.costs else ""
        needs = [need for kernel in offers if kernel.operation == operation for need in kernel.needs]
        extras = sorted({extra for need in needs if find_spec(need) is None and (extra := _extra(need))})
        remedy = f"; `uv sync --extra {extras[0]}` adds it" if extras else ""
        yield Finding("kernels", operation, "warn", f"{choice}{cost}{remedy}")


def _extra(module: str) -> Optional[str]:
    """The extra of Zooforge that brings the package of this module."""
    wanted = _normal(module)
    try:
        lines = requires("zooforge") or []
    except PackageNotFoundError:
        return None
    for line in lines:
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if found and _normal(found[1]) == wanted:
            return found[2]
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
