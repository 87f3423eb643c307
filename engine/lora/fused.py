"""Experts that the reference model holds together, and where PEFT keeps their adapters. Free of torch.

transformers 5 holds the matrices of all experts of a layer in one parameter, gate above up [E, 2F, H]. PEFT adapts a
parameter by its name (`target_parameters`) with one pair for all experts: A [E R, in], expert after expert, and
B [out, R E], where the expert is the index that runs fastest. The experts of one rank R share nothing, but gate and up
share A. Separate pairs of rank r for both are the pair of rank 2 r with A = [A_gate; A_up] and B in diagonal blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from engine.checkpoint.weight_map import Shape, WeightMap
from engine.lora.names import adapter_shapes, last

EXPERT = re.compile(r"(?<=\.)\d+(?=\.)")
WRAPPED = "base_layer"  # PEFT's name of a module inside the adapter around it: parameters of one module are nested


@dataclass(frozen=True)
class Fused:
    """A parameter of the reference that holds one or several matrices of each expert; `{i}` is the layer."""

    parameter: str  # model.layers.{i}.mlp.experts.gate_up_proj
    members: tuple[str, ...]  # published layers, from the top: model.layers.{i}.mlp.experts.{e}.gate_proj ...
    rows: tuple[int, ...]  # of each of them
    experts: int


@dataclass(frozen=True)
class Seat:
    """One expert's matrix in a parameter of the reference."""

    fused: Fused
    parameter: str
    expert: int
    branch: int  # its number among the members


@dataclass(frozen=True)
class Place:
    """Where the pair A [r, in], B [out, r] of one published layer lies in PEFT's tensors, and its scale."""

    stored: str  # the name of PEFT's pair, without .lora_A.weight
    r: int
    scale: float
    shape: Shape  # [out, in] of the published layer
    rank: int  # of each expert in PEFT's pair
    height: int  # rows of PEFT's B
    first: int = 0  # where this layer's ranks begin ...
    row: int = 0  # ... and its rows
    experts: int = 1
    expert: int = 0

    @property
    def plain(self) -> bool:
        """Whether PEFT's pair is this layer's alone."""
        return self.experts == 1

    def stored_shapes(self) -> dict[str, Shape]:
        """PEFT's tensors by name."""
        total = self.rank * self.experts
        return adapter_shapes({self.stored: (self.height, self.shape[1])}, total)

    def part(self, name: str, whole: Any) -> Any:
        """The view of this layer's A or B, whichever `name` ends with, in PEFT's tensor."""
        ranks = slice(self.first, self.first + self.r)
        if name.endswith("lora_A.weight"):
            return whole.view(self.experts, self.rank, self.shape[1])[self.expert, ranks]
        rows = slice(self.row, self.row + self.shape[0])
        return whole.view(self.height, self.rank, self.experts)[rows, ranks, self.expert]

    def beside(self, whole: Any) -> tuple[Any, Any]:
        """This layer's rows of PEFT's B in the ranks before and after its own: zeros in diagonal blocks."""
        rows = whole.view(self.height, self.rank, self.experts)[self.row : self.row + self.shape[0], :, self.expert]
        return rows[:, : self.first], rows[:, self.first + self.r :]


def fused_of(weight_map: WeightMap) -> list[Fused]:
    """The parameters in which a family's reference holds its experts, in the order of their module."""
    found = []
    for rule in weight_map.native:
        runs = rule.rows(1)
        names = [EXPERT.sub("{e}", name.removesuffix(".weight")) for name, _, _ in runs]
        members = dict(zip(names, (count for _, _, count in runs), strict=True))
        if not rule.megatron.endswith(".weight") and all("{e}" in name for name in names):
            experts = len(runs) // len(members)
            found.append(Fused(rule.megatron, tuple(members), tuple(members.values()), experts))
    return found


def plain_place(layer: str, shape: Shape, r: int, scale: float) -> Place:
    """Of a layer that has a pair of its own in PEFT's files."""
    return Place(stored=layer, r=r, scale=scale, shape=shape, rank=r, height=shape[0])


def seats(layers: Iterable[str], fused: Sequence[Fused]) -> dict[str, Seat]:
    """The seats of the layers that have one."""
    patterns = [(kind, branch, _pattern(member)) for kind in fused for branch, member in enumerate(kind.members)]
    found = {}
    for layer in layers:
        for kind, branch, pattern in patterns:
            if match := pattern.fullmatch(layer):
                parameter = kind.parameter.replace("{i}", match["i"])
                found[layer] = Seat(kind, parameter, int(match["e"]), branch)
    return found


def _pattern(member: str) -> re.Pattern[str]:
    return re.compile(re.escape(member).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)"))


def fused_places(
    layers: dict[str, Shape],
    fused: Sequence[Fused],
    targeted: Callable[[str], bool],
    strength: Callable[[str], tuple[int, float]],
    blocks: Optional[Collection[str]],
) -> dict[str, Place]:
    """The places of the experts' matrices among `layers` whose parameter is targeted.

    `strength` gives the rank R of each expert in a parameter's pair, and its scale. `blocks` are the last names of the
    matrices that have diagonal blocks of B; None: all share A.
    """
    found: dict[str, Place] = {}
    there = seats(layers, fused)
    nested: dict[str, list[str]] = {}  # the targeted parameters of a module, the innermost first
    for kind in fused:
        for seat in there.values():
            if seat.fused is kind and targeted(seat.parameter):
                inside = nested.setdefault(seat.parameter.rpartition(".")[0], [])
                inside += [] if seat.parameter in inside else [seat.parameter]
    for layer, seat in there.items():
        kind, (module, _, _) = seat.fused, seat.parameter.rpartition(".")
        own = [i for i, member in enumerate(kind.members) if blocks is None or last(member) in blocks]
        if not targeted(seat.parameter) or seat.branch not in own:
            continue
        rank, scale = strength(seat.parameter)
        depth = len(nested[module]) - 1 - nested[module].index(seat.parameter)
        r = rank if blocks is None else rank // len(own)
        found[layer] = Place(
            stored=".".join([module, *[WRAPPED] * depth]),
            r=r,
            scale=scale,
            shape=layers[layer],
            rank=rank,
            height=sum(kind.rows),
            first=0 if blocks is None else own.index(seat.branch) * r,
            row=sum(kind.rows[: seat.branch]),
            experts=kind.experts,
            expert=seat.expert,
        )
    return found
