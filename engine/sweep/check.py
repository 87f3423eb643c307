"""Planning all runs of a sweep before the first one starts."""

from __future__ import annotations

from engine.errors import UserError
from engine.plan import Plan, plan
from engine.sweep.space import Parameter


def check(family: str, combinations: list[list[str]], identity: str) -> list[Plan]:
    """Plan every run. A UserError, each mistake once, if any cannot be."""
    plans: list[Plan] = []
    problems: dict[str, None] = {}
    for number, combination in enumerate(combinations):
        try:
            plans.append(plan(family, [*combination, f"run_id={identity}-{number}"]))
        except UserError as error:
            problems |= dict.fromkeys(str(error).splitlines())
    if problems:
        raise UserError("\n".join(problems))
    return plans


def check_space(family: str, space: list[Parameter], fixed: list[str]) -> list[Plan]:
    """Plan runs with every value, or both ends, of each parameter, the others at their first or their last value.

    UserError for a value that cannot be with either; what does not go together otherwise is a trial that fails.
    """
    firsts, lasts = ([p.examples()[at] for p in space] for at in (0, -1))
    plans: list[Plan] = []
    problems: dict[str, None] = {}
    for number, parameter in enumerate(space):
        for word in parameter.examples():
            try:
                plans.append(_plan_either(family, fixed, word, number, firsts, lasts))
            except UserError as error:
                problems |= dict.fromkeys(_whole(line, word, parameter) for line in str(error).splitlines())
    if problems:
        raise UserError("\n".join(problems))
    return plans


def _plan_either(family: str, fixed: list[str], word: str, number: int, firsts: list[str], lasts: list[str]) -> Plan:
    try:
        return plan(family, [*fixed, *firsts[:number], word, *firsts[number + 1 :]])
    except UserError as error:
        try:
            return plan(family, [*fixed, *lasts[:number], word, *lasts[number + 1 :]])
        except UserError:
            raise error from None


def _whole(line: str, word: str, parameter: Parameter) -> str:
    """For an interval of fractions where whole numbers are needed: a line that says how to write one of those."""
    if parameter.values or not line.startswith(f"{word}: must be a whole number"):
        return line
    ends = f"interval({parameter.low:g},{parameter.high:g})"
    return f"{parameter.key}={ends}: must be a whole number; int({ends}) draws such"
