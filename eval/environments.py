"""The environments of simulators: `zoo eval-env libero` builds one beside Zooforge's own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from engine.errors import UserError
from engine.suggest import did_you_mean
from engine.verbs import read_words

HERE = Path(__file__).parent
BENCHMARKS = {"libero": "3.12"}  # and the Python that its pins need
STAMP = "zooforge-requirements"
VARIABLE = "ZOOFORGE_EVAL_ENVS"
HELP = """Builds the environment that a benchmark's simulator runs in, apart from Zooforge's own.

Usage: zoo eval-env BENCHMARK

  BENCHMARK   libero

Environments lie in $ZOOFORGE_EVAL_ENVS, else in ~/.cache/zooforge/eval. One that is there and up to date stays."""


def command(words: list[str]) -> int:
    """`zoo eval-env BENCHMARK`."""
    given = read_words("zoo eval-env", HELP, words)
    if given is None:
        return 0
    if len(given[0]) != 1:
        raise UserError(f"name one benchmark: {', '.join(BENCHMARKS)}")
    print(build(given[0][0]))
    return 0


def place(benchmark: str) -> Path:
    """Where a benchmark's environment lies, if it does. UserError for a benchmark that is not there."""
    if benchmark not in BENCHMARKS:
        raise UserError(
            f"benchmark={benchmark}: there are {', '.join(BENCHMARKS)}{did_you_mean(benchmark, BENCHMARKS)}"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zooforge" / "eval"
    return Path(os.environ.get(VARIABLE) or cache) / benchmark


def python_of(benchmark: str) -> Path:
    """The interpreter of a benchmark's environment. UserError if it is not built, or of other requirements."""
    if benchmark == "toy":  # it needs nothing
        return Path(sys.executable)
    folder = place(benchmark)
    if not (folder / STAMP).is_file():
        raise UserError(f"{benchmark} is not installed; `zoo eval-env {benchmark}` builds its environment")
    if (folder / STAMP).read_text() != _wanted(benchmark):
        raise UserError(f"{folder}: built for another version; `zoo eval-env {benchmark}` builds it anew")
    return folder / "bin" / "python"


def build(benchmark: str) -> Path:
    """Build the environment unless it is there. UserError, with the installer's last words, if it cannot be."""
    folder = place(benchmark)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another may be building the same
        if not (folder / STAMP).is_file() or (folder / STAMP).read_text() != _wanted(benchmark):
            _build(benchmark, folder)
    return folder


def _build(benchmark: str, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    requirements, python = HERE / benchmark / "requirements.txt", folder / "bin" / "python"
    version = BENCHMARKS[benchmark]
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if uv := shutil.which("uv"):
        # Away from this repository, whose own pins are not the simulator's.
        _run(
            [uv, "venv", "-q", "--no-project", "--python", sys.executable if here == version else version, str(folder)],
            folder.parent,
        )
        _run([uv, "pip", "install", "-q", "--python", str(python), "-r", str(requirements)], folder.parent)
    else:
        interpreter = sys.executable if here == version else shutil.which(f"python{version}")
        if not interpreter:
            raise UserError(f"{benchmark} needs Python {version}; install it, or uv, which brings it")
        _run([interpreter, "-m", "venv", str(folder)], folder.parent)
        _run([str(python), "-m", "pip", "install", "-q", "-r", str(requirements)], folder.parent)
    (folder / STAMP).write_text(_wanted(benchmark))


def _wanted(benchmark: str) -> str:
    return hashlib.sha256((HERE / benchmark / "requirements.txt").read_bytes()).hexdigest()


def _run(words: list[str], where: Path) -> None:
    done = subprocess.run(words, cwd=where, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"`{' '.join(words[:3])} ...` failed: {said[-1] if said else done.returncode}")
