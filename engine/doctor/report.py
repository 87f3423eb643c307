"""What the doctor found: findings in sections, as a table, as lines or as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

# A finding that fails makes the machine unhealthy; a warning names what would be better; "-" is only said.
STATES = ("ok", "warn", "fail", "-")
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "-": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str  # hardware | versions | kernels | host | self-test
    name: str
    state: str  # one of STATES
    words: str
    seconds: Optional[float] = None  # of a test


@dataclass
class Report:
    """All findings about the hardware of this name."""

    hardware: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.of("fail")

    def of(self, state: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.state == state]

    def verdict(self) -> str:
        """One line that says how it stands."""
        if self.healthy:
            count = len(self.of("warn"))
            warnings = f", with {count} warning{'s' if count > 1 else ''}" if count else ""
            return f"hardware={self.hardware} is healthy{warnings}"
        failed = ", ".join(f"{f.section} {f.name}" for f in self.of("fail"))
        return f"hardware={self.hardware} is not healthy: {failed}"

    def as_json(self) -> dict[str, Any]:
        """Plain values: hardware, healthy, and findings with section, name, state, words and seconds."""
        return {
            "hardware": self.hardware,
            "healthy": self.healthy,
            "verdict": self.verdict(),
            "findings": [asdict(finding) for finding in self.findings],
        }


def print_report(report: Report) -> None:
    """A table on a terminal, a line for each finding elsewhere; the verdict comes last."""
    if sys.stdout.isatty():
        _table(report)
    else:
        for finding in report.findings:
            print(f"{finding.section} {finding.name}: {_state(finding)}{_words(finding)}")
    print(report.verdict(), flush=True)


def _state(finding: Finding) -> str:
    return "" if finding.state == "-" else f"{finding.state}, "


def _words(finding: Finding) -> str:
    return finding.words + (f" ({finding.seconds:.2f} s)" if finding.seconds is not None else "")


def _table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    last = ""
    for finding in report.findings:
        section = "" if finding.section == last else finding.section
        last = finding.section
        state = Text("" if finding.state == "-" else finding.state, style=COLOURS[finding.state])
        table.add_row(section, finding.name, state, Text(_words(finding)))
    Console().print(table)
