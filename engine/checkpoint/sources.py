"""Where first weights come from: random values, or a Hugging Face directory. Checkpoints are in `reader.py`."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.dequantise import rectangle
from engine.checkpoint.headers import INDEX as HF_INDEX
from engine.checkpoint.headers import SINGLE, mismatches, read_folder
from engine.checkpoint.index import Shape
from engine.checkpoint.paths import find_checkpoint
from engine.checkpoint.quantised import Quantised, find, logical, quantization_of
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.tensor_file import TensorFiles
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.lora.adapter import base_of, is_adapter, place_adapters, read_adapter
from engine.lora.sources import Merged

CACHE_BYTES = 2 << 30

Fill = Callable[[str, Tensor, torch.Generator], None]


# Values that some architectures begin with in the place of the usual ones, by the names that their configs give them.
SPECIAL: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "zeros": lambda tensor, _: tensor.zero_(),
    "ones": lambda tensor, _: tensor.fill_(1),
    # Decay of a recurrent state, as a logarithm; not from 0, whose logarithm has no end.
    "decay": lambda tensor, generator: tensor.uniform_(0.01, 16, generator=generator).log_(),
    "scattered": lambda tensor, generator: tensor.normal_(0, 0.1, generator=generator),
    "sinusoids": lambda tensor, _: sinusoids(tensor),
}


def sinusoids(table_PW: Tensor) -> Tensor:
    """Fill a table of positions (arXiv 1706.03762, section 3.5): sines in even columns, cosines in odd ones."""
    half = table_PW.shape[1] // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / half))
    angles = torch.arange(len(table_PW)).float()[:, None] * rates
    table_PW[:, 0::2], table_PW[:, 1::2] = angles.sin(), angles.cos()
    return table_PW


def normal(std: float, special: Callable[[str], str | None] | None = None) -> Fill:
    """Norm weights 1, biases 0, everything else from a normal distribution: the published `initializer_range`.

    `special` gives published names whose values are of another kind, a key of `SPECIAL`.
    """

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if special and (kind := special(name)):
            SPECIAL[kind](tensor, generator)
        elif tensor.dim() == 1 and name.endswith(".weight"):
            tensor.fill_(1)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, std, generator=generator)

    return fill


class InitSource:
    """Fresh fp32 values. A tensor depends on (seed, published name) alone, so every layout starts from the same.

    Optimizer moments start at 0. `fill` decides how a tensor is drawn; the default is `normal(std)`.
    """

    def __init__(self, seed: int, std: float, fill: Fill | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        self._seed, self._fill, self._cache_bytes = seed, fill or normal(std), cache_bytes
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        if kind != "param":
            return torch.zeros(extent)
        whole = self._cache.pop(name, None)
        if whole is None or tuple(whole.shape) != tuple(shape):
            whole = self._draw(name, shape)
        self._cache[name] = whole
        while len(self._cache) > 1 and sum(t.numel() * 4 for t in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        return _cut(whole, offset, extent).clone()

    def _draw(self, name: str, shape: Shape) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tensor = torch.empty(shape, dtype=torch.float32)
        self._fill(name, tensor, generator)
        return tensor


class HFSource:
    """A Hugging Face directory: one safetensors file, or several with an index. Weights only.

    `dtypes` and `shapes` describe what is stored, under the stored names, quantised matrices as what they make; a read
    dequantises what it asks for. `aliases` lets a tied tensor be read from
    whichever of its two names the directory stores.
    """

    def __init__(
        self,
        folder: Path,
        aliases: dict[str, str] | None = None,
        stand_ins: dict[str, str] | None = None,
        transposed: frozenset[str] = frozenset(),
    ) -> None:
        """`stand_ins`: what to read in the place of a tensor that is not stored. `transposed`: stored names of matrices
        whose rows and columns are changed over; shapes and reads are of the matrix.
        """
        self.folder = folder
        self._files = TensorFiles(folder)
        found = read_folder(folder)
        self._quantised: dict[str, Quantised] = find(found, quantization_of(folder))
        self._stored = {name: (info.file.name, info.shape) for name, info in found.items()}
        found = logical(found, self._quantised)
        self._where = {name: info.file.name for name, info in found.items()}
        self._transposed = transposed
        self.shapes: dict[str, Shape] = {n: info.shape[:: self._way(n)] for n, info in found.items()}
        self.dtypes: dict[str, str] = {name: info.dtype for name, info in found.items()}
        self.aliases, self.stand_ins = aliases or {}, stand_ins or {}
        self._also = {target: alias for alias, target in self.aliases.items() if alias in self.shapes}

    def check(self, published: dict[str, Shape]) -> None:
        """UserError listing every tensor that is missing or of another shape.

        Also if both names of a tied tensor are stored with different values.
        """
        check_shapes(self.folder, self.shapes, published, self.aliases, self.stand_ins)
        for alias, target in self.aliases.items():
            if alias in self.shapes and target in self.shapes and not _same(self.stored(alias), self.stored(target)):
                raise UserError(
                    f"{self.folder}: '{alias}' differs from '{target}', but config.json ties them: one would be lost; "
                    f"set tie_word_embeddings to false there, or remove '{alias}'"
                )

    def stored(self, name: str) -> Tensor:
        """A whole tensor under its stored name."""
        shape = self.shapes[name]
        return self._rectangle(name, (0,) * len(shape), shape)

    def _way(self, name: str) -> int:
        """The step through a stored tensor's dimensions that gives the matrix's."""
        return -1 if name in self._transposed else 1

    def _rectangle(self, name: str, offset: Shape, extent: Shape) -> Tensor:
        one = self._quantised.get(name)
        if one is None:
            way = self._way(name)
            stored = self._files.rectangle(self._where[name], name, offset[::way], extent[::way])
            return stored.t().contiguous() if way < 0 else stored
        if one.also and (said := tuple(self._part(one.also, (0,), (2,)).tolist())) != one.shape:
            raise UserError(f"{self.folder}: {one.also} says {list(said)} and {one.values} makes {list(one.shape)}")
        return rectangle(one, offset, extent, self._part)

    def _part(self, stored: str, offset: Shape, extent: Shape) -> Tensor:
        """A part of one of the tensors that a quantised matrix is made of."""
        file, shape = self._stored[stored]
        if any(o + e > size for o, e, size in zip(offset, extent, shape, strict=True)):
            raise UserError(f"{self.folder}: '{stored}' has shape {list(shape)}, too small for its matrix")
        return self._files.rectangle(file, stored, offset, extent)

    def file_of(self, kind: str, name: str) -> Path:
        """Where a tensor lies."""
        return self.folder / self._where[self._name(name)]

    def _name(self, name: str) -> str:
        """What a published tensor is stored as; its own name if it is not."""
        for one in (name, self.stand_ins.get(name)):
            if one in self._where:
                return one
            if one in self._also:
                return self._also[one]
        return name

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        if kind != "param":
            raise UserError(f"{self.folder}: a Hugging Face directory holds weights only, no {kind} '{name}'")
        stored = self._name(name)
        if stored not in self._where:
            raise UserError(f"{self.folder}: holds no tensor '{name}'")
        if self.shapes[stored] != tuple(shape):
            raise UserError(f"{self.folder}: '{name}' has shape {self.shapes[stored]}, the model needs {tuple(shape)}")
        return self._rectangle(stored, tuple(offset), tuple(extent))


def open_weights(path: Path, family: Family, model: Any) -> HFSource | ShardedSource | Merged:
    """The source that `model.weights` names: a Hugging Face directory, a checkpoint of ours or a run folder.

    An adapter's folder gives its base with the adapter added.

    UserError, listing all that does not fit, unless its tensors are those of the model.
    """
    weight_map = load_dotted(family.weights)(model)
    if is_adapter(path):
        places = place_adapters(read_adapter(path), weight_map)
        return Merged(open_weights(base_of(path), family, model), path, places)
    if not is_hf(path):
        source = ShardedSource(_our_checkpoint(path))
        check_shapes(source.folder, source.index.shapes(), weight_map.published, weight_map.aliases)
        return source
    hf = HFSource(path, weight_map.aliases, weight_map.stand_ins, weight_map.transposed)
    hf.check(weight_map.published)
    return hf


def is_hf(path: Path) -> bool:
    """Whether a folder holds weights as Hugging Face publishes them."""
    return (path / SINGLE).is_file() or (path / HF_INDEX).is_file()


def _our_checkpoint(path: Path) -> Path:
    """The checkpoint of ours at a path that is no Hugging Face directory."""
    try:
        return find_checkpoint(path)
    except UserError:
        raise UserError(
            f"{path}: no weights here; model.weights takes a Hugging Face directory ({SINGLE} or {HF_INDEX}), "
            "a checkpoint folder or a run folder"
        ) from None


def check_shapes(
    folder: Path,
    stored: dict[str, Shape],
    published: dict[str, Shape],
    aliases: dict[str, str],
    stand_ins: dict[str, str] | None = None,
) -> None:
    """UserError listing every tensor that is missing or of another shape.

    A tied tensor may be stored under its name, its alias or both. Tensors that the model has no use for are the
    controller's to report.
    """
    if problems := mismatches(stored, published, aliases, stand_ins or {}):
        raise UserError(f"{folder}: the tensors are not those of this model:\n  " + "\n  ".join(problems))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaNs included."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _cut(whole: Tensor, offset: Shape, extent: Shape) -> Tensor:
    return whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
