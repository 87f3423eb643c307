"""Adapters as tensor sources: beside frozen weights for training, or added to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.nn.functional import pad

from engine.checkpoint.index import Shape
from engine.checkpoint.paths import is_checkpoint
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.tensor_file import TensorFiles
from engine.errors import UserError
from engine.lora.adapter import BLOCKS, MODEL
from engine.lora.fused import Place
from engine.lora.names import PREFIX, is_adapter_name, layer_of

WHOLE = 4  # tensors of a PEFT file that are held: A and B of gate and up, and of down


class Files(Protocol):
    """A source of files, as `engine.faults.finite` asks for it."""

    folder: Path

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor: ...

    def file_of(self, kind: str, name: str) -> Path: ...


class AdapterFile:
    """The tensors of a PEFT directory under published names: experts one by one, smaller ranks filled with zeros."""

    def __init__(self, folder: Path, places: Mapping[str, Place]) -> None:
        self.folder = folder
        self._files, self._places = TensorFiles(folder), places
        # Experts are asked for one after another, and each is a part of the same few tensors.
        self._whole: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        place = self._places[layer_of(name)]
        if place.plain and place.stored_shapes()[name] == tuple(shape):
            return self._files.rectangle(MODEL, PREFIX + name, tuple(offset), tuple(extent))
        whole = self._stored(name.replace(layer_of(name), place.stored))
        if name.endswith("lora_B.weight") and any(other.any() for other in place.beside(whole)):
            raise UserError(
                f"{self.folder / MODEL}: {BLOCKS} in its metadata says that {place.stored} has diagonal blocks, "
                "and it has not; save it without that"
            )
        part = place.part(name, whole)
        part = pad(part, (0, shape[1] - part.shape[1], 0, shape[0] - part.shape[0]))
        return part[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))].contiguous()

    def file_of(self, kind: str, name: str) -> Path:
        return self.folder / MODEL

    def _stored(self, name: str) -> Tensor:
        whole = self._whole.pop(name, None)
        if whole is None:
            whole = self._files.rectangle(MODEL, PREFIX + name, (0, 0), self._files.shape(MODEL, PREFIX + name))
        self._whole[name] = whole
        while len(self._whole) > WHOLE:
            self._whole.popitem(last=False)
        return whole


def open_adapter(folder: Path, places: Mapping[str, Place]) -> AdapterFile | ShardedSource:
    """The adapters of a PEFT directory or of a checkpoint of ours; `place_adapters` says where they lie."""
    return ShardedSource(folder) if is_checkpoint(folder) else AdapterFile(folder, places)


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

    def __init__(self, base: Files, folder: Path, places: Mapping[str, Place]) -> None:
        self.base, self.folder = base, folder
        self._places, self._source = places, open_adapter(folder, places)

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        tensor = self.base.read(kind, name, shape, offset, extent)
        layer = name.removesuffix(".weight")
        place = self._places.get(layer)
        if kind != "param" or place is None:
            return tensor
        (rows, columns), r = place.shape, place.r
        down = self._source.read(kind, f"{layer}.lora_A.weight", (r, columns), (0, offset[1]), (r, extent[1]))
        up = self._source.read(kind, f"{layer}.lora_B.weight", (rows, r), (offset[0], 0), (extent[0], r))
        return tensor.float() + place.scale * (up.float() @ down.float())

    def file_of(self, kind: str, name: str) -> Path:
        return self.base.file_of(kind, name)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the base's tensors, under the names that it stores."""
        return self.base.index.shapes() if isinstance(self.base, ShardedSource) else self.base.shapes
