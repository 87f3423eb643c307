"""The floor's environment: an interpreter that is here already, and the packages of `requirements.txt`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Optional

HERE = Path(__file__).parent
VERSION = "3.10"
UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "Network connectivity is disabled", "offline")


def interpreter() -> Optional[str]:
    """A Python 3.10 that is installed; None is downloaded. pyenv's are asked for too: uv sees only their shims."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = subprocess.run(
        ["uv", "python", "find", "--no-python-downloads", VERSION], capture_output=True, text=True, check=False
    )
    named = found.stdout.strip() if found.returncode == 0 else ""
    for candidate in [named, *map(str, sorted(root.glob(f"versions/{VERSION}.*/bin/python")))]:
        if candidate and _works(candidate):
            return candidate
    return None


def _works(candidate: str) -> bool:
    code = "import ssl, sqlite3, ctypes, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == VERSION


def build(folder: Path, python: str) -> tuple[Optional[str], str]:
    """(the environment's interpreter, "") or (None, why it cannot be had here). A broken requirement raises."""
    subprocess.run(["uv", "venv", "-q", "--no-python-downloads", "--python", python, str(folder)], check=True)
    own = str(folder / "bin" / "python")
    command = ["uv", "pip", "install", "-q", "--python", own, "-r", str(HERE / "requirements.txt")]
    command += ["--overrides", str(HERE / "overrides.txt")]
    # Away from the repository, whose pyproject.toml pins the versions of Python 3.12.
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        return None, f"packages cannot be fetched: {done.stderr.strip().splitlines()[0]}"
    if done.returncode:
        raise RuntimeError(done.stderr)
    return own, ""
