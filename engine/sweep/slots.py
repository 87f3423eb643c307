"""How many runs of a sweep go on at a time, and which devices each sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import UserError
from engine.plan import Plan, accelerators
from engine.words import counted
from hardware.base import Hardware


@dataclass(frozen=True)
class Slots:
    """The environment of each place for a run. A single place has the terminal and all devices."""

    environments: tuple[dict[str, str], ...] = ({},)
    port: int | None = None  # of the first place, where runs have a fixed one: the others count on from it

    def __len__(self) -> int:
        return len(self.environments)

    def words(self, slot: int) -> list[str]:
        """Overrides that keep runs at the same time apart."""
        return [] if self.port is None else [f"launcher.master_port={self.port + slot}"]


def divide(
    wanted: int | None, most: int, hardware: Hardware | None, check: Callable[[], list[Plan]]
) -> tuple[Slots, list[Plan]]:
    """The places for runs, and the plans of all runs as they are in such a place.

    `wanted`: sweep.slots. `most`: runs that there are. `hardware`: the plugin of all runs; None if they differ. `check`
    plans the runs with the devices that the environment shows. Raises UserError if the devices do not hold so many runs
    at a time.
    """
    if wanted is None:
        plans = check()
        slots = _automatic(most, hardware, plans)
    elif wanted == 1:
        plans, slots = check(), Slots()
    else:
        slots = _asked(wanted, hardware)
        plans = _check_share(wanted, slots, check)
        if hardware is not None and not accelerators(hardware):
            # Cores are shared by the ranks of all places, and how many ranks a run has is known only now.
            share = hardware.share_env(0, _ranks(plans), wanted) or {}
            slots = Slots((share,) * wanted)
    if len(slots) > 1 and any(planned.run.launcher.nodes > 1 for planned in plans):
        raise UserError(f"sweep.slots={len(slots)}: runs over several nodes go one at a time; leave it out")
    ports = [port for planned in plans if (port := planned.run.launcher.master_port) is not None]
    return (Slots(slots.environments, ports[0]) if len(slots) > 1 and ports else slots), plans


def _ranks(plans: list[Plan]) -> int:
    """The most ranks of a run on this machine."""
    return max(planned.run.launcher.nproc_per_node or 1 for planned in plans)


def _automatic(most: int, hardware: Hardware | None, plans: list[Plan]) -> Slots:
    """As many places as the accelerators hold the largest run; one on a CPU, or where devices cannot be divided."""
    devices = accelerators(hardware) if hardware is not None else 0
    each = _ranks(plans)
    count = min(devices // each, most)
    if hardware is None or count < 2 or any(planned.run.launcher.nodes > 1 for planned in plans):
        return Slots()
    shares = [hardware.share_env(n * each, each, count) for n in range(count)]
    return Slots() if None in shares else Slots(tuple(share for share in shares if share is not None))


def _asked(wanted: int, hardware: Hardware | None) -> Slots:
    """Equal parts of the devices; a CPU has any number of places."""
    if hardware is None:
        raise UserError(f"sweep.slots={wanted}: the runs are on different hardware, and go one at a time; leave it out")
    devices = accelerators(hardware)
    if devices and wanted > devices:
        raise UserError(
            f"sweep.slots={wanted}: this machine has {counted(devices, 'device')}; at most so many runs go at a time"
        )
    each = devices // wanted if devices else 0
    shares = [hardware.share_env(n * each, max(1, each), wanted) for n in range(wanted)]
    if None in shares:
        raise UserError(f"sweep.slots={wanted}: hardware={hardware.name} cannot divide its devices; leave it out")
    return Slots(tuple(share for share in shares if share is not None))


def _check_share(wanted: int, slots: Slots, check: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans in one place. A mistake is laid to sweep.slots if the runs could be with all devices."""
    try:
        with _environment(slots.environments[0]):
            return check()
    except UserError as error:
        check()
        reason = "; ".join(str(error).splitlines())
        raise UserError(
            f"sweep.slots={wanted}: too many, its part of the devices does not hold a run ({reason})"
        ) from None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
