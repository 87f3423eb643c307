"""Adapters as tensor sources: beside frozen weights for training, or added to them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.checkpoint.index import Shape
from engine.checkpoint.paths import is_checkpoint
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.tensor_file import TensorFiles
from engine.lora.adapter import MODEL, Adapter, adapter_tensors
from engine.lora.names import PREFIX, is_adapter_name, layer_of


class Files(Protocol):
    """A source of files, as `engine.faults.finite` asks for it."""

    folder: Path

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor: ...

    def file_of(self, kind: str, name: str) -> Path: ...


class AdapterFile:
    """The tensors of a PEFT directory under published names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = TensorFiles(folder)

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        return self._files.rectangle(MODEL, PREFIX + name, tuple(offset), tuple(extent))

    def file_of(self, kind: str, name: str) -> Path:
        return self.folder / MODEL


def open_adapter(folder: Path) -> AdapterFile | ShardedSource:
    """The adapters of a PEFT directory or of a checkpoint of ours; `check_adapter` checks them."""
    return ShardedSource(folder) if is_checkpoint(folder) else AdapterFile(folder)


class Beside:
    """Frozen weights from one source, adapters (and their optimizer's state) from another. Moments start at zero."""

    def __init__(self, base: Files, adapters: Files) -> None:
        self.folder = base.folder
        self._base, self._adapters = base, adapters

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        return self._source(name).read(kind, name, shape, offset, extent)

    def file_of(self, kind: str, name: str) -> Path:
        return self._source(name).file_of(kind, name)

    def _source(self, name: str) -> Files:
        return self._adapters if is_adapter_name(name) else self._base


class Merged:
    """Weights with their adapters added: W + scale B A, computed and given in fp32 where there is an adapter."""

    def __init__(self, base: Files, adapter: Adapter) -> None:
        self.base, self.folder = base, adapter.folder
        self._adapter, self._source = adapter, open_adapter(adapter.folder)
        self._shapes = adapter_tensors(adapter.folder)
        self._layers = {layer_of(name) for name in self._shapes}

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        tensor = self.base.read(kind, name, shape, offset, extent)
        layer = name.removesuffix(".weight")
        if kind != "param" or layer not in self._layers:
            return tensor
        r = self._adapter.r
        down = self._part(f"{layer}.lora_A.weight", (0, offset[1]), (r, extent[1]))
        up = self._part(f"{layer}.lora_B.weight", (offset[0], 0), (extent[0], r))
        return tensor.float() + self._adapter.scale * (up @ down)

    def file_of(self, kind: str, name: str) -> Path:
        return self.base.file_of(kind, name)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the base's tensors, under the names that it stores."""
        return self.base.index.shapes() if isinstance(self.base, ShardedSource) else self.base.shapes

    def _part(self, name: str, offset: Shape, extent: Shape) -> Tensor:
        return self._source.read("param", name, self._shapes[name], offset, extent).float()
