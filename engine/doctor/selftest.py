"""Runs the probe in a process of its own, so that a crash, a hang or an import of torch stays there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Optional

from engine.doctor.report import Finding
from hardware.base import Hardware

SECTION = "self-test"
TIMEOUT_S = 180.0  # importing everything takes up to half a minute, the tests some seconds
PROBE = ("-m", "engine.doctor.probe")


def self_test(
    hardware: Hardware, command: Sequence[str] = (sys.executable, *PROBE), timeout_s: float = TIMEOUT_S
) -> list[Finding]:
    """The probe's findings; a test in which it died or hung is one that failed."""
    environment = {**os.environ, **hardware.launch_env(0, 1), "LOCAL_RANK": "0", "RANK": "0"}
    try:
        done = subprocess.run(
            [*command, hardware.name], env=environment, capture_output=True, timeout=timeout_s, check=False
        )
        out, errors, ended = done.stdout, done.stderr, _ended(done.returncode)
    except subprocess.TimeoutExpired as late:
        out, errors, ended = late.stdout or b"", late.stderr or b"", f"no answer for {timeout_s:g} s"
    findings, begun = [], "start"
    for event in _events(out):
        if "ok" in event:
            state = "ok" if event["ok"] else "fail"
            findings.append(Finding(SECTION, event["test"], state, event["words"], event["seconds"]))
            begun = ""
        else:
            begun = event["test"]
    if begun or ended:
        said = errors.decode(errors="replace").strip().splitlines()
        words = ": ".join(part for part in (ended or "ended without a result", said[-1] if said else "") if part)
        findings.append(Finding(SECTION, begun or "end", "fail", words))
    return findings


def _ended(code: int) -> Optional[str]:
    if code >= 0:
        return f"exit status {code}" if code else None
    return f"killed by {signal.Signals(-code).name}"


def _events(out: bytes) -> list[dict[str, Any]]:
    """The whole lines of the probe."""
    events = []
    for line in out.decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "test" in event:
            events.append(event)
    return events
