"""What decides which sample has which number. Runs that agree in all of it see the same samples in the same order.

Free of torch: the controller compares before anything starts, a worker once more when it has opened the data.
"""

from __future__ import annotations

from typing import Any

from engine.data.mixture import about, has_chats, sources
from engine.data.sources import SourceFile, list_files
from engine.schema import Data, Run

WHAT = {
    "corpus": "other data: files behind data.path were added, removed, or changed in size",
    "tokenizer": "another tokenizer than this run's",
    "chat_template": "another chat template than this run's",
}
CHAT = ("train_on_prompt", "train_turns", "final_tool_calls")


def settings_identity(run: Run) -> dict[str, Any]:
    """The settings that order the samples."""
    data = run.data
    return {
        "seed": run.seed,
        "data.seq_len": data.seq_len,
        "data.global_batch_size": data.global_batch_size,
        "data.shuffle_rows": max(1, data.shuffle_rows),
        "data.name": data.name,
        "data.field": data.field,
        "data.held_out": data.held_out,
        "data.split": data.split,
        "data.shuffle_documents": data.shuffle_documents,
        "data.mixture": [[s.name, s.data.name, s.data.field, s.data.split, s.weight] for s in sources(data)]
        if data.name == "mixture"
        else None,
    } | {f"data.{key}": getattr(data, key) for key in CHAT if has_chats(data)}


def corpus_identity(kind: str, files: list[SourceFile]) -> str:
    """Of the files by name and size: the same on another machine."""
    from engine.data.files import digest

    return digest(kind, ((f.identity, f.size) for f in files))


def data_identity(run: Run) -> dict[str, Any]:
    """All of it but the tokenizer, without opening a file. UserError if the data is not there."""
    return settings_identity(run) | {"corpus": _corpus(run.data)}


def _corpus(data: Data) -> str:
    if data.name != "mixture":
        return corpus_identity(data.name, list_files(data))
    corpora = []
    for source in sources(data):
        with about(source):
            corpora.append((source.name, corpus_identity(source.data.name, list_files(source.data))))
    return mixture_identity(corpora)


def mixture_identity(corpora: list[tuple[str, str]]) -> str:
    """Of a mixture by its sources' names and identities."""
    from engine.data.files import digest

    return digest("mixture", corpora)


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What the data was before, where `now` says otherwise. What only one of them knows is passed over."""
    return [
        WHAT.get(key, f"{key}={before[key]}, and this run has {value}")
        for key, value in now.items()
        if key in before and before[key] != value
    ]


def refusal(differences: list[str]) -> str:
    """The line for a resume with other data."""
    return (
        f"checkpoint.resume: the checkpoint was made with {'; '.join(differences)}; "
        "resume with the same, or start afresh from its weights with model.weights"
    )
