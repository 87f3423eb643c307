"""The command line of `zoo doctor`. Torch-free: the self-test has a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from engine.doctor.machine import detections, host_findings, obstacles
from engine.doctor.packages import kernel_findings, version_findings
from engine.doctor.report import Report, print_report
from engine.doctor.selftest import self_test
from engine.errors import UserError
from engine.verbs import read_words
from hardware import registry
from hardware.base import Hardware

UNHEALTHY = 1
KEYS = ("hardware", "output_dir")
HELP = """Says whether this machine can run Zooforge, and what would make it better.

Usage: zoo doctor [hardware=NAME] [output_dir=DIR] [--json]

  hardware=NAME     the hardware to examine; auto takes what is here
  output_dir=DIR    where runs are going to be written (outputs)
  --json            all findings as JSON

It looks at every hardware plugin, at versions, kernels, disk and shared memory, and tests the device for some seconds
in a process of its own. Exit status: 0 healthy, 1 not healthy, 2 a mistake in this command."""


def doctor(words: list[str]) -> int:
    """Examine this machine and say what was found; the exit status. UserError for words that it does not know."""
    given = read_words("zoo doctor", HELP, words)
    if given is None:
        return 0
    settings, as_json = given
    values = {"hardware": "auto", "output_dir": "outputs"} | _values(settings)
    report = examine(_hardware(values["hardware"]), Path(values["output_dir"]))
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report)
    return 0 if report.healthy else UNHEALTHY


def examine(hardware: Hardware, output_dir: Path) -> Report:
    """Everything that can be found out about this machine with this hardware."""
    report = Report(hardware.name)
    report.findings += detections(hardware)
    here = report.healthy
    if here:
        report.findings += obstacles(hardware)
    report.findings += version_findings()
    report.findings += kernel_findings(hardware.kernels())
    report.findings += host_findings(output_dir)
    if here:
        report.findings += self_test(hardware)
    return report


def _hardware(name: str) -> Hardware:
    """The plugin, be its hardware here or not: to say so is the doctor's work. HardwareError for an unknown name."""
    return registry.get() if name == "auto" else registry.plugin(name)


def _values(settings: list[str]) -> dict[str, str]:
    values = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in KEYS or not equals or not value:
            raise UserError(f"zoo doctor: {setting!r} is not known; {' and '.join(f'{k}=...' for k in KEYS)} are")
        if key in values:
            raise UserError(f"zoo doctor: {key} is given twice; one is enough")
        values[key] = value
    return values
