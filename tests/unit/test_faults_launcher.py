"""Ranks that die, fail, stop or hang: what the launcher makes of it. The ranks are small programs without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.cli import prepare
from engine.faults.board import PAGE, Board, Page
from engine.launch.local import start
from engine.launch.signals import raised
from engine.launch.supervise import NOTHING_SAVED, Worker, supervise
from engine.launch.verdict import settle
from engine.launch.watchdog import Watchdog
from engine.rundir import open_folder

RANK = """
import os, signal, sys, time
sys.path.insert(0, os.environ["HERE"])
from engine.faults.board import Page
from engine.faults.stacks import show_stacks_in
from pathlib import Path
rank = int(os.environ["RANK"])
page = Page.open(rank, rank)
show_stacks_in(Path(os.environ["LOGS"]) / f"rank_{rank}.log")
def lost():
    time.sleep(0.2)
    page.tell(1, "RuntimeError: Connection closed by peer", "Traceback: gloo", consequence=True)
    os._exit(1)
page.beat("step 7, forward and backward")
"""
WAIT = "time.sleep(60)"


@pytest.fixture
def ranks(tmp_path):
    """Starts programs as ranks; gives (workers, board, logs)."""
    board, logs = Board(2), tmp_path / "logs"
    logs.mkdir()
    started = []

    def begin(*programs):
        for rank, program in enumerate(programs):
            environment = {**os.environ, **board.environment(), "RANK": str(rank), "LOGS": str(logs)}
            log = logs / f"rank_{rank}.log" if rank else None
            command = [sys.executable, "-c", RANK + program]
            process = start(command, environment | {"HERE": str(tmp_path)}, 0, log)
            started.append(Worker(f"rank {rank}", process, log))
        deadline = time.monotonic() + 20
        while sum(1 for seen in board.seen() if seen.beats) < len(programs) and time.monotonic() < deadline:
            time.sleep(0.01)
        return started, board, logs

    yield begin
    for worker in started:
        worker.process.kill()
        worker.process.wait()
    board.close()


def test_a_killed_rank_is_the_cause_and_said_once(ranks, tmp_path, capfd):
    workers, board, _ = ranks("lost()", "os.kill(os.getpid(), signal.SIGKILL)")
    verdict = supervise(workers, board)
    assert verdict.status == 137
    words = "rank 1 was killed by SIGKILL in step 7, forward and backward; the system does this when memory runs out"
    assert verdict.message == words
    run = prepare("qwen3", ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "run_id=one"])
    folder = open_folder(run, "x")
    (folder.path / "result.json").write_text(json.dumps({"status": "failed", "message": "gloo", "step": 6}))
    assert settle(verdict, run, folder) == 137
    said = capfd.readouterr().err
    assert said == f"error: {words}\n"
    result = json.loads((folder.path / "result.json").read_text())
    assert (result["message"], result["step"], result["status"]) == (words, 6, "failed")
    os.close(folder.lock)


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_rank_saw_of_another_is_no_cause(ranks, first):
    """Whichever of the two ends first."""
    culprit = 'page.tell(2, "bad weights"); os._exit(2)'
    victim = 'page.tell(2, "another rank says why", consequence=True); os._exit(2)'
    pause = "time.sleep(0.3); "
    programs = (victim, pause + culprit) if first == 0 else (culprit, pause + victim)
    verdict = supervise(*ranks(*programs)[:2])
    assert (verdict.status, verdict.message) == (2, "bad weights")


def test_a_bug_is_shown_with_its_traceback(ranks, tmp_path, capfd):
    workers, board, _ = ranks("lost()", 'page.tell(1, "KeyError: 3", "Traceback\\n  here"); os._exit(1)')
    verdict = supervise(workers, board)
    assert (verdict.status, verdict.message, verdict.more) == (1, "rank 1 failed: KeyError: 3", ("Traceback", "  here"))


def test_a_rank_that_is_stopped_is_named(ranks):
    workers, board, logs = ranks(WAIT, "os.kill(os.getpid(), signal.SIGSTOP)")
    begin = time.monotonic()
    verdict = supervise(workers, board, Watchdog(board, 1.0, logs))
    assert time.monotonic() - begin < 10 and all(worker.status for worker in workers)
    assert verdict.status == 1 and "no progress for 1 s: rank 1 is behind in step 7" in verdict.message
    assert "stopped (SIGSTOP" in verdict.message and "rank 0" not in verdict.message
    assert "most recent call first" in (logs / "rank_0.log").read_text()


def test_a_rank_that_loops_is_told_from_one_that_waits_for_it(ranks, tmp_path):
    """Both are in the same step; only their stacks tell them apart."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "fake_collective.py").write_text("import time\ndef all_reduce():\n    time.sleep(60)\n")
    waits = f'sys.path.insert(0, "{package}"); import fake_collective; fake_collective.all_reduce()'
    workers, board, logs = ranks(waits, "def spin():\n    while True: pass\nspin()")
    verdict = supervise(workers, board, Watchdog(board, 1.0, logs))
    assert "rank 1 is behind" in verdict.message and "(spin)" in verdict.message and "rank 0" not in verdict.message
    assert "(all_reduce)" not in verdict.message and "spin" in (logs / "rank_1.log").read_text()


def test_a_rank_that_fell_back_or_all_that_wait(ranks, tmp_path):
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "fake_collective.py").write_text("import time\ndef all_reduce():\n    time.sleep(60)\n")
    waits = f'sys.path.insert(0, "{package}"); import fake_collective; fake_collective.all_reduce()'
    workers, board, logs = ranks(waits, waits)
    verdict = supervise(workers, board, Watchdog(board, 1.0, logs))
    assert "every rank of this machine waits for others in step 7, forward and backward" in verdict.message


def test_who_makes_progress_or_rests_is_left_alone(ranks):
    beats = "\nfor i in range(30):\n    page.beat(f'step {i}')\n    time.sleep(0.2)"
    workers, board, logs = ranks(beats, "page.rest(); time.sleep(6)")
    assert supervise(workers, board, Watchdog(board, 4.0, logs)).status == 0


def test_a_machine_that_slept_is_no_rank_that_hangs(monkeypatch, tmp_path):
    board, now = Board(1), [1000.0]
    monkeypatch.setenv("ZOOFORGE_BOARD", board.environment()["ZOOFORGE_BOARD"])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    page, watchdog = Page.open(0, 0), Watchdog(board, 60.0, tmp_path)
    page.beat("step 1")

    def late(seconds, step=1.0):
        while seconds > 0:
            now[0] += min(step, seconds)
            seconds -= step
            if watchdog._late(now[0]):
                return True
        return False

    assert not late(59) and not late(3600, step=3600) and not late(59)
    page.beat("step 2")
    assert not late(60) and late(1)
    board.close()


def stopped_by(number, *programs, ranks, again=0.0):
    workers, board, _ = ranks(*programs)

    def signals():
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        if again:
            time.sleep(again)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=signals)
    thread.start()
    verdict = supervise(workers, board)
    thread.join()
    return verdict


SAVES = """
def save(*_):
    page.tell(75, "stopped after step 7, which is saved in here")
    os._exit(75)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal(ranks, number, capfd):
    verdict = stopped_by(number, SAVES, SAVES, ranks=ranks)
    assert (verdict.status, verdict.message) == (75, "stopped after step 7, which is saved in here")
    assert "saving a checkpoint" in capfd.readouterr().err


def test_a_signal_while_ranks_start(ranks):
    verdict = stopped_by(signal.SIGTERM, SAVES.replace("75", "1"), WAIT, ranks=ranks)
    assert (verdict.status, verdict.message) == (143, NOTHING_SAVED)


def test_a_second_signal_ends_the_run_and_blames_no_memory(ranks):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    verdict = stopped_by(signal.SIGINT, deaf, deaf, ranks=ranks, again=1.3)
    assert (verdict.status, verdict.message) == (130, "ended at once, as the second signal asked")


def test_a_signal_that_arrives_twice_is_one(ranks):
    """`timeout` signals its process and then the group, and `uv run` passes on what the group got too."""
    slow = SAVES.replace("    page", "    time.sleep(0.6)\n    page")
    verdict = stopped_by(signal.SIGTERM, slow, slow, ranks=ranks, again=0.2)
    assert (verdict.status, verdict.message) == (75, "stopped after step 7, which is saved in here")


def test_a_worker_without_a_launcher_has_a_page_of_its_own(monkeypatch):
    for value in (None, "/proc/1/fd/999", "", "/dev/null"):
        if value is None:
            monkeypatch.delenv("ZOOFORGE_BOARD", raising=False)
        else:
            monkeypatch.setenv("ZOOFORGE_BOARD", value)
        page = Page.open(3, 3)
        page.beat("anything")
        assert not page.watched


def test_long_texts_fit_a_page(monkeypatch):
    board = Board(2)
    monkeypatch.setenv("ZOOFORGE_BOARD", board.environment()["ZOOFORGE_BOARD"])
    pages = [Page.open(rank, rank) for rank in range(2)]
    pages[1].beat("untouched")
    pages[0].beat("é" * 3000)
    pages[0].tell(1, "\U0001f600" * PAGE, "\x00" * PAGE)
    first, second = board.seen()
    assert set(first.note["message"]) == {"\U0001f600"} and set(first.note["traceback"]) == {"\x00"}
    assert (second.operation, second.rank, second.note) == ("untouched", 1, None)
    board.close()


def test_a_signal_to_the_controller_undoes_and_exits(tmp_path):
    """From the start of a command until its workers have it: 128 and the signal's number, one line, nothing left."""
    program = (
        "import os, signal, sys\nimport engine.launch, engine.cli as cli\n"
        "def launch(run, folder, hardware):\n    os.kill(os.getpid(), int(sys.argv[1])); signal.pause()\n"
        "engine.launch.launch = launch\n"
        "cli.main('qwen3', ['hardware=cpu', f'output_dir={sys.argv[2]}', 'run_id=one'])"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, "-c", program, str(int(number)), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (128 + number, "")
        assert done.stderr.splitlines()[-1] == f"stopped by {number.name}" and "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_signals_are_raised_and_then_as_before():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as stop, raised():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stop.value.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before


def test_output_goes_on_without_its_reader(tmp_path):
    """`... | head -1`: no traceback, and the program runs to its end."""
    program = (
        "from engine.outlet import lasting_output\nlasting_output()\nimport sys, time\n"
        "for i in range(2000): print(f'line {i}', flush=True)\n"
        f"print('to stderr', file=sys.stderr); open('{tmp_path}/end', 'w').write('reached')"
    )
    shell = f'{sys.executable} -c "$1" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell, "-", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "line 0\n0\n" and done.stderr == "to stderr\n"
    assert (tmp_path / "end").read_text() == "reached"
