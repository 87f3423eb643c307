"""Runs the probe in a process of its own, so that a crash, a hang or an import of torch stays there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, Optional

from engine.doctor.patience import Patience, usage
from engine.doctor.report import Finding
from hardware.base import Hardware

SECTION = "self-test"
TIMEOUT_S = 180.0  # importing everything takes up to half a minute, the tests some seconds
LOOK_S = 0.25
SLOW_S = 60.0  # after so long the user is told that it goes on, and again after as long
PROBE = ("-m", "engine.doctor.probe")


def self_test(
    hardware: Hardware, command: Sequence[str] = (sys.executable, *PROBE), timeout_s: float = TIMEOUT_S
) -> list[Finding]:
    """The probe's findings; a test in which it died or hung is one that failed.

    Each test may take `timeout_s` of time that the probe could have used: a busy machine makes nobody ill.
    """
    environment = {**os.environ, **hardware.launch_env(0, 1), "LOCAL_RANK": "0", "RANK": "0"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with subprocess.Popen([*command, hardware.name], env=environment, stdout=out, stderr=errors) as process:
            try:
                ended = _wait(process, out, timeout_s)
            finally:
                process.kill()  # where it has ended, this does nothing
        events, said = _events(_text(out)), _text(errors).strip().splitlines()
    findings, begun = [], "start"
    for event in events:
        if "ok" in event:
            state = "ok" if event["ok"] else "fail"
            findings.append(Finding(SECTION, event["test"], state, event["words"], event["seconds"]))
            begun = ""
        else:
            begun = event["test"]
    if begun or ended:
        words = ": ".join(part for part in (ended or "ended without a result", said[-1] if said else "") if part)
        findings.append(Finding(SECTION, begun or "end", "fail", words))
    return findings


def _wait(process: subprocess.Popen[bytes], out: IO[bytes], limit_s: float) -> Optional[str]:
    """Wait for the probe as long as it comes on; how it ended, if not well."""
    patience, lines, begin = Patience(limit_s, lambda: usage(process.pid)), 0, time.monotonic()
    told = begin
    while True:
        with suppress(subprocess.TimeoutExpired):
            return _ended(process.wait(LOOK_S))
        if (found := _text(out).count("\n")) > lines:
            lines = found
            patience.progress()
        if patience.over():
            return patience.words()
        if time.monotonic() - told > SLOW_S:
            told = time.monotonic()
            print(f"the self-test goes on after {told - begin:.0f} s; Ctrl-C ends it", file=sys.stderr, flush=True)


def _text(file: IO[bytes]) -> str:
    """All that a process has written so far; it goes on where it was."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _ended(code: int) -> Optional[str]:
    if code >= 0:
        return f"exit status {code}" if code else None
    return f"killed by {signal.Signals(-code).name}"


def _events(out: str) -> list[dict[str, Any]]:
    """The whole lines of the probe."""
    events = []
    for line in out.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "test" in event:
            events.append(event)
    return events
