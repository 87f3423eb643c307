"""README's first command, as a newcomer types it, and what it leaves behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.data.loader import build_data
from engine.freeze import load_run
from tests.e2e import commands

pytestmark = pytest.mark.slow
CONTEXT = 64


class PeakMemory(threading.Thread):
    """The highest resident memory of a process and all its children together, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._over, self.peak = psutil.Process(pid), threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.2):
            try:
                family = [self._process, *self._process.children(recursive=True)]
                self.peak = max(self.peak, sum(p.memory_info().rss for p in family))
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.peak


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the default command has run."""
    place = tmp_path_factory.mktemp("default")
    process = commands.start(place)
    memory = PeakMemory(process.pid)
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output
    assert memory.stop() < 3e9
    return place


def test_it_learns(trained: Path) -> None:
    run_dir = trained / "outputs/qwen3/latest"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "done"
    assert result["val_bits_per_byte"] < 2.3
    rows = [row for row in commands.rows(run_dir / "metrics.jsonl") if "loss" in row]
    assert sum(r["data_wait_s"] for r in rows[1:]) < 0.02 * sum(r["step_s"] for r in rows[1:])
    assert "<svg" in (run_dir / "report.html").read_text()


def test_transformers_loads_it_and_it_reads_its_context(trained: Path) -> None:
    """The held-out loss by transformers is the run's own, and shuffled contexts cost at least 1 nat a token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = trained / "outputs/qwen3/latest"
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf").eval()
    AutoTokenizer.from_pretrained(run_dir / "hf")
    run = load_run(run_dir / "config.yaml")
    run.output_dir = str(trained / "outputs")
    windows, targets = [], []
    for batch in build_data(run, 0, 1).held_out.batches(run.job.eval_rows):
        for tokens, labels, positions in zip(batch.tokens_BS, batch.labels_BS, batch.positions_BS, strict=True):
            for end in range(CONTEXT - 1, len(tokens), CONTEXT):
                if positions[end] >= CONTEXT - 1 and labels[end] >= 0:
                    windows.append(tokens[end - CONTEXT + 1 : end + 1])
                    targets.append(labels[end])
    windows_NC, targets_N = torch.stack(windows), torch.stack(targets)
    generator = torch.Generator().manual_seed(0)
    shuffled_NC = torch.stack([row[torch.randperm(CONTEXT, generator=generator)] for row in windows_NC])
    with torch.inference_mode():
        loss = cross_entropy(model(windows_NC).logits[:, -1], targets_N)
        loss_shuffled = cross_entropy(model(shuffled_NC).logits[:, -1], targets_N)
    result = json.loads((run_dir / "result.json").read_text())
    assert len(targets_N) >= 100
    assert loss.item() == pytest.approx(result["val_loss"], abs=0.6)
    assert loss_shuffled - loss >= 1.0, (loss, loss_shuffled)


def test_it_speaks(trained: Path) -> None:
    status, output = commands.run(
        trained, "job=sample", "model.weights=outputs/qwen3/latest/hf", "prompt=import ", "job.max_new_tokens=8"
    )
    assert status == 0, output
    assert "import " in output
