"""The folder of an evaluation: what was asked for, a line for each finished episode, and their summary."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import UserError
from eval.interval import wilson

HEADER, LINES, SUMMARY, VIDEOS = "eval.json", "results.jsonl", "summary.json", "videos"
# Of a line: not what happened, but how long it took, and what differs in the last bit on another machine.
TIMING = ("seconds", "latency_ms", "attempts", "video", "worker", "actions")

Line = dict[str, Any]
Key = tuple[int, int]


def key_of(line: Line) -> Key:
    """What tells an episode from the others."""
    return line["task"], line["episode"]


class Results:
    """A folder that is written to. An episode that `add` returned from is not lost by whatever comes after."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        """Begin a folder, or go on with one. UserError if it holds an evaluation of something else."""
        self.folder, self.header = folder, header
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HEADER).exists():
            check_same(read_header(folder), header, folder)
            self.lines = read_lines(folder, mend=True)
        else:
            if (folder / LINES).exists():
                raise UserError(f"{folder}: it holds {LINES} but no {HEADER}; name another folder with output=DIR")
            write_json(folder / HEADER, header)
            self.lines = {}
        self._file = (folder / LINES).open("a")

    def add(self, line: Line) -> None:
        """Write an episode's line, through to the disk."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines[key_of(line)] = line

    def close(self) -> dict[str, Any]:
        """Write the summary, and give it."""
        self._file.close()
        summary = summarise(self.header, self.lines.values())
        write_json(self.folder / SUMMARY, summary)
        return summary


def write_json(path: Path, value: Any) -> None:
    """A JSON file in one move."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def read_header(folder: Path) -> dict[str, Any]:
    """What a folder's evaluation was. UserError if it is none."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no {HEADER}; it is not the folder of an evaluation") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / HEADER}: not readable as JSON ({error})") from None
    if not isinstance(header, dict):
        raise UserError(f"{folder / HEADER}: it must hold an object")
    return header


def read_lines(folder: Path, mend: bool = False) -> dict[Key, Line]:
    """Finished episodes. A last line that was cut off by a kill is left out, and with `mend` taken off the file."""
    path = folder / LINES
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if mend and len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    lines: dict[Key, Line] = {}
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            lines[key_of(line)] = line
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: line {number} is no episode's; mend or remove it") from None
    return lines


def check_same(there: dict[str, Any], mine: dict[str, Any], folder: Path) -> None:
    """UserError that names what two evaluations differ in."""
    different = [key for key in sorted({*there, *mine}) if there.get(key) != mine.get(key)]
    if different:
        named = ", ".join(f"{k} ({_short(there.get(k))} there, {_short(mine.get(k))} now)" for k in different[:4])
        raise UserError(f"{folder}: it holds others' results; different: {named}; name another with output=DIR")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def merge(folders: list[Path], into: Path) -> dict[str, Any]:
    """One folder from the shards of an evaluation; its summary. UserError if they are not of one, or disagree."""
    if not folders:
        raise UserError("name the folders to merge")
    header = read_header(folders[0])
    lines: dict[Key, Line] = {}
    videos: dict[str, Path] = {}
    for folder in folders:
        check_same(read_header(folder), header, folder)
        for key, line in read_lines(folder).items():
            if key in lines and outcome(lines[key]) != outcome(line):
                raise UserError(f"{folder}: task {key[0]}, episode {key[1]} ended otherwise than in another folder")
            lines.setdefault(key, line)
            if line.get("video"):
                videos[line["video"]] = folder / VIDEOS / line["video"]
    if (into / LINES).exists():
        raise UserError(f"output={into}: it already holds an evaluation")
    results = Results(into, header)
    for key in sorted(lines):
        results.add(lines[key])
    for name, source in videos.items():
        if source.is_file():
            (into / VIDEOS).mkdir(exist_ok=True)
            (into / VIDEOS / name).write_bytes(source.read_bytes())
    return results.close()


def outcome(line: Line) -> Line:
    """A line without what depends on the machine's speed and mishaps."""
    return {key: value for key, value in line.items() if key not in TIMING}


def rate(lines: Iterable[Line]) -> dict[str, Any]:
    """Successes, episodes, their ratio and its 95% interval."""
    ends = [bool(line["success"]) for line in lines]
    low, high = wilson(sum(ends), len(ends))
    return {
        "successes": sum(ends),
        "episodes": len(ends),
        "rate": sum(ends) / len(ends) if ends else None,
        "low": low,
        "high": high,
    }


def summarise(header: dict[str, Any], lines: Iterable[Line]) -> dict[str, Any]:
    """Everything that is worth a number."""
    lines = sorted(lines, key=key_of)
    tasks = {task: [line for line in lines if line["task"] == task] for task in header["tasks"]}
    latencies = sorted(line["latency_ms"] for line in lines if line.get("latency_ms") is not None)
    rates = {task: rate(mine) | {"prompt": next((m["prompt"] for m in mine), "")} for task, mine in tasks.items()}
    known = [r["rate"] for r in rates.values() if r["rate"] is not None]
    planned = len(header["tasks"]) * header["trials"]
    return {
        "benchmark": header["benchmark"],
        "suite": header["suite"],
        "policy": header["policy"],
        "complete": len(lines) == planned,
        "planned": planned,
        **rate(lines),
        "mean_of_tasks": sum(known) / len(known) if known else None,
        "tasks": {str(task): values for task, values in rates.items()},
        "reasons": dict(Counter(line["reason"] for line in lines if line.get("reason"))),
        "repeated": sum(line.get("attempts", 1) > 1 for line in lines),
        "latency_ms": latencies[len(latencies) // 2] if latencies else None,
        "seconds": round(sum(line.get("seconds", 0.0) for line in lines), 3),
    }
