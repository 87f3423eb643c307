"""The controller: `python -m zoo.<family> key=value ...` and `zoo`. Never imports torch or transformers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine.errors import EXIT_INTERRUPTED, EXIT_USER, Stopped, UserError
from engine.outlet import lasting_output
from engine.verbs import VERBS, Parser, check_word, run_verb

if TYPE_CHECKING:
    from engine.rundir import RunFolder
    from engine.schema import Run


def main(family: str, arguments: list[str] | None = None) -> NoReturn:
    """Run a family's command line and leave with its exit status."""
    lasting_output()
    sys.exit(guarded(lambda: command(family, sys.argv[1:] if arguments is None else arguments)))


def console() -> NoReturn:
    """`zoo` and `python -m zoo`: `list`, `doctor`, `parity A B`, or a family with its `key=value ...`."""
    lasting_output()
    sys.exit(guarded(lambda: zoo(sys.argv[1:])))


def zoo(words: list[str]) -> int:
    """The exit status of `zoo WORD ...`. UserError for a word that is neither a verb nor a family."""
    if not words or words[0] in ("-h", "--help", "help"):
        from engine.help import zoo_help

        return _print(zoo_help())
    if words[0] == "--version":
        return _print(_version())
    if words[0] in VERBS:
        return run_verb(words[0], words[1:])
    check_word(words[0])
    return command(words[0], words[1:])


def guarded(work: Callable[[], int]) -> int:
    """Run a command; a user's mistake is one `error:` line for each thing that is wrong, and status 2.

    A signal to stop is one line and the status that a shell gives it, 128 and its number.
    """
    from engine.launch.signals import raised
    from hardware.base import HardwareError

    try:
        with raised():
            return work()
    except (UserError, HardwareError) as error:
        for line in str(error).splitlines():
            # Indented lines belong to the error above them.
            print(line if line.startswith("  ") else f"error: {line}", file=sys.stderr)
        return EXIT_USER
    except Stopped as stop:
        print(f"stopped by {signal.Signals(stop.number).name}", file=sys.stderr)
        return 128 + stop.number


def prepare(family: str, overrides: list[str]) -> Run:
    """The run that these overrides describe: composed, checked and resolved. UserError, one mistake a line."""
    from engine.plan import plan

    return plan(family, overrides).run


def _parser(family: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m zoo.{family}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("-m", "--multirun", action="store_true")
    return parser


def command(family: str, words: list[str]) -> int:
    """One command line of a family; the exit status."""
    from engine.family import load_family

    load_family(family)
    options = _parser(family).parse_intermixed_args(words)
    overrides: list[str] = options.overrides
    if options.version:
        return _print(_version())
    if options.help:
        from engine.help import family_help

        return _print(family_help(family, overrides))
    if options.multirun:
        from engine.sweep.command import sweep

        return sweep(family, overrides, show=options.cfg is not None)
    if options.cfg:
        from engine.freeze import to_yaml

        return _print(to_yaml(prepare(family, overrides)).rstrip())
    return start(family, overrides)


def start(family: str, overrides: list[str]) -> int:
    """Plan a run and, unless it is only to be printed, start it and wait for it."""
    from engine.plan import plan

    planned = plan(family, overrides)
    if planned.finished and planned.run.launcher.name != "print":
        steps = planned.run.schedule.steps
        return _print(
            f"nothing left to train: {planned.run.checkpoint.resume} has all {steps} steps; "
            f"schedule.steps={2 * steps} would go on"
        )
    for note in planned.notes:
        print(f"note: {note}", file=sys.stderr)
    if planned.run.launcher.name == "print":
        from engine.launch.show import commands

        return _print(commands(planned.run, planned.hardware, overrides))
    from engine.checkpoint.paths import newest
    from engine.launch import launch
    from engine.launch.verdict import STOPPED
    from engine.rundir import open_folder

    line = command_line(family, overrides)
    folder = open_folder(planned.run, line, planned.resuming, planned.words, planned.place)
    try:
        status = launch(planned.run, folder, planned.hardware)
    except BaseException:
        if not folder.kept():
            folder.take_back()
        raise
    status = _close(planned.run, folder, status)
    if status == EXIT_INTERRUPTED or (status in STOPPED and newest(folder.path)):
        print(f"continue with: {command_line(family, [f'checkpoint.resume={folder.path}'])}", file=sys.stderr)
    return status


def _close(run: Run, folder: RunFolder, status: int) -> int:
    """Say where the run is; take its folder back if it was refused before anything came of it.

    A run that was there before also keeps what it says of itself when going on with it failed in any other way.
    """
    if status and not folder.kept() and (status in (EXIT_USER, 129, 130, 143) or not folder.created):
        folder.take_back()
        return status
    result = folder.path / "result.json"
    if status and (not result.is_file() or result.stat().st_mtime < folder.started):
        state = {"status": "failed", "job": run.job.name, "message": f"exit status {status}"}
        result.write_text(json.dumps(state, indent=1) + "\n")
    if status == 0 and run.job.name != "sample":
        print(f"run folder: {folder.path}")
    return status


def command_line(family: str, overrides: list[str]) -> str:
    """A command for a shell that repeats this one."""
    return shlex.join([*program(family), *overrides])


def program(family: str) -> list[str]:
    """How this Python runs a family: by its short name where a shell finds the same one."""
    if os.environ.get("UV_RUN_RECURSION_DEPTH"):  # started by `uv run`, perhaps from outside of the environment
        return ["uv", "run", "-m", f"zoo.{family}"]
    here = shutil.which("python")
    same = here is not None and Path(here).absolute() == Path(sys.executable).absolute()
    return ["python" if same else sys.executable, "-m", f"zoo.{family}"]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"zooforge {version('zooforge')}"
    except PackageNotFoundError:
        return "zooforge (from its source tree)"


def _print(text: str) -> int:
    print(text, flush=True)
    return 0
