"""A command on the fake Kunlun runtime: a host with two cards, and what its workers were given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware.kunlun.environment import COMMON

REPO = Path(__file__).parent.parent.parent
FAKE = Path(__file__).parent / "fake_kunlun"
TINY = ("schedule.steps=3", "data.seq_len=64", "data.global_batch_size=2", "job.eval_rows=2")


def environment(torch: str, **own: str) -> dict[str, str]:
    """What a worker gets, with the fake runtime installed for a torch of this version."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "XPU_", "FAKE_"))}
    paths = {"PYTHONPATH": f"{FAKE}{os.pathsep}{REPO}", "PATH": f"{FAKE / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return kept | COMMON | paths | {"ZOOFORGE_KUNLUN_TORCH": torch} | own


class Host:
    """A host's folder: its device files and network interfaces, and a note of every process's environment."""

    def __init__(self, folder: Path, torch: str, python: str = sys.executable, cards: str = "OAM:0,OAM:4") -> None:
        self.folder, self._torch, self._python, self._cards = folder, torch, python, cards
        (folder / "notes").mkdir()
        (folder / "dev" / "net").mkdir(parents=True)
        for name in ("xpuctrl", "xpu0", "xpu1"):
            (folder / "dev" / name).touch()

    def command(self, words: Sequence[str], **own: str) -> subprocess.CompletedProcess[str]:
        """`python -m zoo.qwen3` in the folder, with an environment that has nothing of the runtime's own."""
        places = {"FAKE_DEV": str(self.folder / "dev"), "FAKE_NOTES": str(self.folder / "notes")}
        given = environment(self._torch, **places, FAKE_CARDS=self._cards, **own)
        clean = {key: value for key, value in given.items() if key not in COMMON}
        command = [self._python, "-m", "zoo.qwen3", *words]
        return subprocess.run(command, env=clean, cwd=self.folder, capture_output=True, text=True)

    def train(self, name: str, *words: str) -> list[dict[str, Any]]:
        """Three steps of the default recipe on two cards; the rows of metrics.jsonl that have a loss."""
        done = self.command(["hardware=kunlun", f"run_id={name}", *words, *TINY])
        assert done.returncode == 0, done.stderr
        metrics = self.folder / "outputs" / "qwen3" / name / "metrics.jsonl"
        return [row for line in metrics.read_text().splitlines() if "loss" in (row := json.loads(line))]

    def workers(self) -> list[dict[str, Any]]:
        """What each worker process found when it began: `environment`, `command`, and whether `torch` was loaded."""
        notes = [json.loads(file.read_text()) for file in (self.folder / "notes").iterdir()]
        return [note for note in notes if "engine.worker" in note["command"]]
