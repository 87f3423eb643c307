"""The conversations of chat files by number, never held in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

from engine.data.cache import cached
from engine.data.chat.files import format_of, is_array, mixed, parse_json, read_array
from engine.data.chat.records import Conversation, parse
from engine.data.corpus import Corpus
from engine.data.files import digest, stamps
from engine.data.identity import corpus_identity
from engine.data.sources import SourceFile, list_files
from engine.schema import Data


class ChatCorpus(Corpus):
    """A conversation is a line of a file, or a record of a JSON array. `read` gives what is said in it."""

    def __init__(self, data: Data, cache: Path):
        files = list_files(data)
        self._final_tool_calls, self._format = data.final_tool_calls, data.format
        self._kinds: dict[int, tuple[str, int]] = {}  # of each file: its format, and the line that says so
        self._arrays = {n for n, file in enumerate(files) if is_array(file.path)}
        self._originals = files
        lines = [_as_lines(file, cache) if n in self._arrays else file for n, file in enumerate(files)]
        super().__init__(lines, "jsonl", "messages", data.held_out, cache)
        self.identity = corpus_identity(data.name, files)
        self.cache_key = digest("chat", data.held_out, data.final_tool_calls, stamps(files))

    def conversation(self, document: int) -> Optional[Conversation]:
        """None for a blank line. Raises BadSample for one that is no use, and UserError for a mix of formats."""
        file, start, end = self.place(document)
        record = parse_json(self.reader.read(self.files[file].path, start, end))
        if record is None:
            return None
        kind, line = format_of(record), self._line(document, file)
        known, first = self._kinds.setdefault(file, (self._format or kind, line))
        if kind != known:
            raise mixed(self._originals[file].path, {known: [first], kind: [line]})
        return parse(record, kind, self._final_tool_calls)

    def read(self, document: int) -> str:
        conversation = self.conversation(document)
        return "\n".join(m["content"] for m in conversation.messages) if conversation else ""

    def where(self, document: int) -> str:
        file, _, _ = self.place(document)
        return f"{self._originals[file].path}:{self._line(document, file)}"

    def _line(self, document: int, file: int) -> int:
        return document - int(self.first[file]) + 1

    def _cut_single(self, share: float) -> None:
        """A single conversation is not cut in two: nothing is held out."""


def _as_lines(file: SourceFile, cache: Path) -> SourceFile:
    """A JSON array as a file of lines in the cache, so that one record can be read without the others."""

    def build(folder: Path) -> None:
        place = folder / file.identity
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(record) + "\n" for record in read_array(file.path))

    folder = cache / f"records-{digest(stamps([file]))}"
    cached(folder, build)
    stat = (folder / file.identity).stat()
    return SourceFile(str(folder), file.identity, stat.st_size, stat.st_mtime_ns)
