"""The run folder, its lock and `latest`; the processes of a run and how they end; what is printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import engine.cli as cli
import engine.launch
from engine.cli import command, guarded, prepare
from engine.errors import UserError
from engine.family import family_names
from engine.freeze import load_run
from engine.help import family_help
from engine.launch import local
from engine.launch.local import start
from engine.launch.supervise import Worker, supervise
from engine.launch.verdict import Verdict, settle
from engine.rundir import new_run_id, open_folder
from engine.schema import JOBS

ROOT = Path(__file__).parents[2]


def a_run(tmp_path, *overrides):
    return prepare("qwen3", ["hardware=cpu", f"output_dir={tmp_path / 'out'}", *overrides])


def release(folder):
    os.close(folder.lock)


def target(link: Path) -> str:
    return str(link.readlink())


def checkpoint(folder: Path, step: int, model) -> Path:
    """What a complete checkpoint has, as far as the controller looks."""
    place = folder / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True)
    (place / "index.json").write_text("{}")
    (place / "state.json").write_text(json.dumps({"step": step}))
    keys = {k: v for k, v in vars(model).items() if k not in ("name", "weights")}
    (place / "config.json").write_text(json.dumps({"model_type": "qwen3", **keys}))
    return place


def test_ids_of_one_second_differ_and_sort():
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) > 45 and all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", i) for i in ids)


def test_a_new_folder(tmp_path):
    run = a_run(tmp_path, "run_id=one")
    folder = open_folder(run, "python -m zoo.qwen3 run_id=one")
    assert folder.path == tmp_path / "out" / "qwen3" / "one"
    assert load_run(folder.path / "config.yaml") == run
    assert (folder.path / "command.txt").read_text() == "python -m zoo.qwen3 run_id=one\n"
    assert target(tmp_path / "out" / "qwen3" / "latest") == "one"
    release(folder)


def test_one_folder_one_run(tmp_path):
    run = a_run(tmp_path, "run_id=one")
    folder = open_folder(run, "x")
    with pytest.raises(UserError) as error:
        open_folder(run, "x", resuming=True)
    here = f"(process {os.getpid()}); wait until it ends, stop it with `kill {os.getpid()}`, or choose another run_id"
    assert str(error.value) == f"{folder.path}: in use by a running job {here}"
    lock = folder.path / ".lock"
    for text, words in (
        ("7 elsewhere\n", "process 7 on elsewhere); wait until it ends, stop it there with `kill 7`"),
        (f"{2**22 + 1} {socket.gethostname()}\n", f"has ended, but not all that it started: `fuser {lock}` names them"),
        ("", f"of a process that `fuser {lock}` names); wait until it ends"),
    ):
        lock.write_text(text)
        with pytest.raises(UserError) as error:
            open_folder(run, "x", resuming=True)
        assert words in str(error.value) and str(error.value).endswith(", or choose another run_id")
    release(folder)
    with pytest.raises(UserError, match=r"exists; add checkpoint.resume=auto"):
        open_folder(run, "x")
    again = open_folder(run, "y", resuming=True)
    assert (again.path / "command.txt").read_text() == "x\ny\n"
    release(again)


def test_a_run_that_came_to_nothing_leaves_no_trace(tmp_path):
    first = open_folder(a_run(tmp_path, "run_id=one"), "x")
    second = open_folder(a_run(tmp_path, "run_id=two"), "x")
    latest = second.path.parent / "latest"
    assert target(latest) == "two" and not second.kept()
    second.take_back()
    assert target(latest) == "one" and not second.path.exists()
    (first.path / "metrics.jsonl").write_text("")
    assert not first.kept()
    (first.path / "metrics.jsonl").write_text("{}\n")
    assert first.kept()
    first.take_back()
    assert not latest.is_symlink()
    release(first), release(second)


def test_a_refused_resume_restores_the_config(tmp_path):
    run = a_run(tmp_path, "run_id=one")
    release(open_folder(run, "x"))
    old = time.time() - 60
    saved = checkpoint(tmp_path / "out" / "qwen3" / "one", 5, run.model)
    os.utime(saved, (old, old))  # from before: not this run's
    latest = tmp_path / "out" / "qwen3" / "latest"
    release(open_folder(a_run(tmp_path, "run_id=two"), "x"))
    other = open_folder(a_run(tmp_path, "run_id=one", "seed=7"), "y", resuming=True, words=["seed=7"])
    assert load_run(other.config).seed == 7 and target(latest) == "one"
    assert not other.kept()
    other.take_back()
    assert load_run(other.config) == run and other.path.is_dir() and target(latest) == "two"
    assert (other.path / "command.txt").read_text() == "x\n"
    assert json.loads((other.path / "overrides.json").read_text()) == []
    release(other)


@pytest.mark.parametrize("words", [["job=prepare"], ["job=forward", "data.inputs=x.safetensors"]])
def test_what_trains_nothing_does_not_move_latest(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.safetensors").touch()
    release(open_folder(a_run(tmp_path, "run_id=one"), "x"))
    release(open_folder(a_run(tmp_path, "run_id=two", *words), "x"))
    assert target(tmp_path / "out" / "qwen3" / "latest") == "one"


def test_an_output_dir_that_cannot_be(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="output_dir"):
        open_folder(a_run(tmp_path), "x")


def test_latest_that_is_no_link_is_left_alone(tmp_path):
    (tmp_path / "out" / "qwen3" / "latest").mkdir(parents=True)
    with pytest.raises(UserError, match="move it away"):
        open_folder(a_run(tmp_path), "x")
    assert [p.name for p in (tmp_path / "out" / "qwen3").iterdir()] == ["latest"]


SLEEP = "import time; time.sleep(60)"


def workers(tmp_path, *programs):
    made = []
    for rank, program in enumerate(programs):
        log = tmp_path / f"rank_{rank}.log" if rank else None
        made.append(Worker(f"rank {rank}", start([sys.executable, "-c", program], dict(os.environ), 0, log), log))
    return made


@pytest.mark.parametrize(
    ("programs", "status", "words"),
    [
        (["", ""], 0, []),
        ([SLEEP, "print('the cause'); raise SystemExit(3)"], 3, ["rank 1", "exit status 3", "the cause", "rank_1.log"]),
        ([SLEEP, "import os; os.kill(os.getpid(), 9)"], 137, ["rank 1", "SIGKILL", "memory"]),
        ([SLEEP, "print('error: bad data'); raise SystemExit(2)"], 2, ["error: bad data"]),
        (["raise SystemExit(75)", "import time; time.sleep(1); raise SystemExit(75)"], 75, []),
    ],
)  # fmt: skip
def test_ranks_end_together(programs, status, words, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("engine.launch.supervise.GRACE_S", 0.5)
    begin = time.monotonic()
    made = workers(tmp_path, *programs)
    verdict = supervise(made)
    assert verdict.status == status
    settle(verdict, a_run(tmp_path), open_folder(a_run(tmp_path, "run_id=one"), "x"))
    assert time.monotonic() - begin < 20 and all(w.status is not None for w in made)
    said = capfd.readouterr().err
    assert [word for word in words if word not in said] == [] and (words or not said)


CONTROLLER = """
import os, sys
from pathlib import Path
from engine.cli import prepare
from engine.launch import local
from engine.launch.local import start
from engine.launch.supervise import Worker, supervise
from engine.rundir import open_folder
run = prepare("qwen3", ["hardware=cpu", f"output_dir={sys.argv[1]}", "run_id=one"])
folder = open_folder(run, "x")
program = '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), sys.exit(75)))
print("worker", os.getpid(), flush=True)
time.sleep(60)
'''
process = start([sys.executable, "-c", program], dict(os.environ), folder.lock, None)
sys.exit(supervise([Worker("rank 0", process)]).status)
"""


def controller(tmp_path):
    """A controller with one worker; both are running when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path / "out")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline().split()[1])


def gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_no_worker_outlives_a_killed_controller_and_the_lock_goes_with_it(tmp_path):
    process, worker = controller(tmp_path)
    with pytest.raises(UserError, match=f"process {process.pid}"):
        open_folder(a_run(tmp_path, "run_id=one"), "x", resuming=True)
    process.kill()
    process.wait()
    assert gone(worker)
    release(open_folder(a_run(tmp_path, "run_id=one"), "x", resuming=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(tmp_path, number):
    process, worker = controller(tmp_path)
    process.send_signal(number)
    said = process.communicate(timeout=20)[0]
    assert (process.returncode, said.count("asked to stop")) == (75, 1) and gone(worker)


def outcome(monkeypatch, tmp_path, status, leaves=()):
    """Start a run whose workers do nothing but end with `status`, after leaving some files."""

    def launch(run, folder, hardware):
        for name, text in leaves:
            (folder.path / name).write_text(text)
        return status

    monkeypatch.setattr(engine.launch, "launch", launch)
    return command("qwen3", ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "run_id=one"])


def test_outcomes(monkeypatch, tmp_path, capsys):
    home = tmp_path / "out" / "qwen3"
    assert outcome(monkeypatch, tmp_path, 2) == 2
    assert not (tmp_path / "out").exists()
    assert outcome(monkeypatch, tmp_path, 1) == 1
    assert json.loads((home / "one" / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("saved", [None, 5])
def test_a_second_signal_leaves_the_cause_and_the_last_checkpoint(monkeypatch, tmp_path, capsys, saved):
    def launch(run, folder, hardware):
        (folder.path / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
        if saved:
            checkpoint(folder.path, saved, run.model)
        return settle(Verdict(130, "ended at once, as the second signal asked"), run, folder)

    monkeypatch.setattr(engine.launch, "launch", launch)
    words = ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "run_id=one"]
    assert command("qwen3", words) == 130
    home = tmp_path / "out" / "qwen3" / "one"
    result = json.loads((home / "result.json").read_text())
    assert (result["status"], result["job"]) == ("interrupted", "train")
    last = "the last checkpoint is step_00000005" if saved else "no checkpoint was saved"
    assert result["message"] == f"ended at once, as the second signal asked; {last}"
    assert result.get("checkpoint") == (str(home / "checkpoints" / "step_00000005") if saved else None)
    assert ("continue with: " in capsys.readouterr().err) == bool(saved)
    assert last in (home / "report.html").read_text()


def test_a_refusal_after_a_step_keeps_the_folder(monkeypatch, tmp_path):
    assert outcome(monkeypatch, tmp_path, 2, [("metrics.jsonl", "{}\n"), ("result.json", '{"status": "failed"}')]) == 2
    assert (tmp_path / "out" / "qwen3" / "one" / "config.yaml").is_file()


def test_errors_are_lines_on_stderr(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert guarded(lambda: command("qwen3", ["lr=1", "model=8B"])) == 2
    said = capsys.readouterr()
    assert said.out == "" and [line[:7] for line in said.err.splitlines()] == ["error: ", "error: "]
    assert guarded(lambda: command("qwen4", [])) == 2 and "zoo list" in capsys.readouterr().err
    assert guarded(lambda: command("qwen3", ["--wat"])) == 2 and "--help" in capsys.readouterr().err
    assert guarded(lambda: command("qwen3", ["--cfg", "all"])) == 2
    assert list(tmp_path.iterdir()) == []


def test_print_gives_one_command_for_each_node(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["hardware=cpu", "model=8b", "parallelism=tp8_pp4", "launcher=print", "launcher.nodes=4", "prompt=null"]
    assert command("qwen3", words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == 4 and list(tmp_path.iterdir()) == []
    for node, line in enumerate(lines):
        parts = shlex.split(line)
        environment = parts[: parts.index("-m") - 1]
        assert environment and all(re.fullmatch(r"[A-Z_]+=.*", part) for part in environment)
        overrides = parts[parts.index("-m") + 2 :]
        assert {"model=8b", "launcher=torchrun", f"launcher.node_rank={node}", "launcher.nproc_per_node=8"} <= set(
            overrides
        )
        run = prepare("qwen3", overrides)  # it is a command that plans
        assert (run.parallelism.tp, run.parallelism.pp, run.parallelism.dp, run.launcher.nodes) == (8, 4, 1, 4)
    assert len({re.search(r"run_id=(\S+)", line)[1] for line in lines}) == 1


def test_print_names_no_hardware_that_nobody_chose(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("qwen3", ["launcher=print", "parallelism=single", "launcher.nproc_per_node=1"]) == 0
    *notes, line = capsys.readouterr().out.splitlines()
    assert notes[0].startswith("# 1 rank: 1 node x 1, tp 1 x pp 1 x dp 1 (each rank holds the whole model)")
    assert "(RANK 0)" in notes[1] and "hardware" not in line
    assert shlex.split(line)[1:3] == ["-m", "zoo.qwen3"]  # and no environment, which would be another machine's


def test_command_txt_repeats_the_run(tmp_path):
    words = ['prompt=it\'s a "test" $HOME', "data.path=a b/*.txt"]
    line = cli.command_line("qwen3", words)
    echo = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True).stdout.splitlines()
    assert echo[1:] == ["-m", "zoo.qwen3", *words]


@pytest.mark.parametrize("words", ["model=8b parallelism=tp4_pp2 launcher=print", "lr=1", "--help", "--cfg job"])
def test_the_controller_needs_neither_torch_nor_transformers(words, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import runpy, atexit\n"
        "heavy = ('torch', 'transformers', 'megatron', 'numpy', 'rich')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "sys.argv[0] = 'zoo'; runpy.run_module('zoo.qwen3', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *words.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == "[]" and done.returncode == (2 if words == "lr=1" else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", family_names())
def test_the_helps_large_example_is_a_command_that_plans(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in family_help(name, []).splitlines() if line.endswith(" launcher=print")]
    assert command(name, [*shlex.split(line)[3:], "hardware=cpu"]) == 0
    assert "# " in capsys.readouterr().out


def test_zoo_lists_families_and_helps(capsys, monkeypatch):
    for words, expected in [
        ([], ["zoo list", "zoo doctor", "zoo parity A B", "python -m zoo is the same", " tiny, "]),
        (
            ["list"],
            [
                "family ",
                "0_6b (596 M), 1_7b (1.72 B)",
                "32b",
                "megatron, native",
                "transformers: Qwen3ForCausalLM, Qwen3Moe",
            ],
        ),
        (["list", "--help"], ["Usage: zoo list [--json]"]),
        (["doctor", "--help"], ["Usage: zoo doctor"]),
        (["parity", "--help"], ["Usage: zoo parity A B"]),
        (["--version"], ["zooforge"]),
        (
            ["qwen3", "--help"],
            ["*tiny", "tp2_pp2", "*cosine", "job=sample", "data.seq_len=128 ", "tokens of a row", "--multirun"],
        ),
        (["qwen3", "model=8b", "--help"], ["*8b", "model.hidden_size=4096 "]),
        (["qwen3", "hardware=cpu", "run_id=one", "--cfg", "job"], ["run_id: one", "nproc_per_node: 1"]),
    ]:
        monkeypatch.setattr(sys, "argv", ["zoo", *words])
        with pytest.raises(SystemExit) as left:
            cli.console()
        said = capsys.readouterr()
        assert (left.value.code, said.err) == (0, "") and [e for e in expected if e not in said.out] == []
    for words, said in (
        (["qwn3"], "eval-merge, demos, demos-replay, serve) nor a model family; did you mean qwen3"),
        (["docter"], "did you mean doctor? (`zoo list` shows the families)"),
        (["list", "x"], "error: zoo list: 'x' is not known"),
        (["list", "--all"], "--help shows what there is"),
    ):
        monkeypatch.setattr(sys, "argv", ["zoo", *words])
        with pytest.raises(SystemExit) as left:
            cli.console()
        error = capsys.readouterr().err
        assert left.value.code == 2 and said in error and error.count("\n") == 1


def test_the_list_is_a_table_on_a_terminal_and_json_where_asked(capsys, monkeypatch):
    assert cli.zoo(["list", "--json"]) == 0
    found = {one["family"]: one for one in json.loads(capsys.readouterr().out)}
    sizes = {file.stem for file in (ROOT / "zoo" / "llm" / "qwen3" / "model").glob("*.yaml")}
    assert set(found["qwen3"]["sizes"]) == sizes and found["qwen3"]["backends"] == ["megatron", "native"]
    assert set(found) == {file.parent.name for file in (ROOT / "zoo").glob("*/*/recipe.yaml")}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.zoo(["list"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 2 * len(found) and max(map(len, lines)) <= 80  # folded


def test_the_package_is_the_command():
    """`python -m zoo X` and `zoo X`, without torch."""
    code = (
        "import sys, runpy, atexit; sys.argv[0] = 'zoo'\n"
        "atexit.register(lambda: print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules]))\n"
        "runpy.run_module('zoo', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "list"], cwd=ROOT, capture_output=True, text=True)
    *listed, heavy = done.stdout.splitlines()
    assert done.returncode == 0 and heavy == "[]" and any(line.startswith("qwen3 ") for line in listed)
    done = subprocess.run([sys.executable, "-m", "zoo", "parity", "a"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "this names 1; zoo parity A B" in done.stderr


@pytest.mark.parametrize("job", JOBS)
def test_help_says_what_every_key_means(job):
    """Comments are the only place where that is written, so a new key without one fails here."""
    text = family_help("qwen3", [f"job={job}", "hardware=cpu"])
    lines = [line.split(None, 1) for line in text.partition("Keys and their values")[2].splitlines() if "=" in line]
    assert len(lines) > 60 and [line[0] for line in lines if len(line) < 2 or len(line[1].split("' ")[-1]) < 5] == []


def test_a_port_that_is_taken_is_not_given(monkeypatch):
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        taken, free = one.getsockname()[1], other.getsockname()[1]
        monkeypatch.setattr(local, "PORTS", (taken, free))
        other.close()
        assert local.free_port() == free
        monkeypatch.setattr(local, "PORTS", (taken,))
        with pytest.raises(UserError, match=r"launcher.master_port"):
            local.free_port()
