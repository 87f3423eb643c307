"""What is wrong with LeRobot folders, found by the controller, and what tells them apart. Free of torch and PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.braces import named_paths
from engine.data.lerobot.meta import Meta, check_packages, read_meta
from engine.data.sources import BadSamples, SourceFile, refuse
from engine.errors import UserError

if TYPE_CHECKING:
    from engine.schema import Data


def lerobot_folders(data: Data) -> list[SourceFile]:
    """The datasets of `data.path`, each once; the size is that of all their files. Raises UserError."""
    found, problems, seen = [], [], set()
    for part in named_paths(str(data.path)):
        folder = Path(part).expanduser()
        if (real := folder.resolve()) in seen:
            continue
        seen.add(real)
        try:
            found.append(_folder(folder))
        except UserError as error:
            problems.append(str(error))
    names = [file.identity for file in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"data.path: several datasets are called {', '.join(twice)}; rename a folder")
    refuse(problems)
    return found


def check_lerobot(data: Data, bad: BadSamples) -> None:
    """Find what is wrong with datasets without decoding anything. Raises UserError."""
    from engine.data.sources import list_files

    check_packages()
    for file in list_files(data):
        meta = read_meta(file.path)
        for camera in data.cameras or ():
            if camera not in meta.cameras:
                have = ", ".join(meta.cameras) or "none"
                raise UserError(f"data.cameras: {meta.folder} has no camera {camera}; its cameras are {have}")
        _check_files(meta, bad)


def _check_files(meta: Meta, bad: BadSamples) -> None:
    there = {path: path.is_file() for path in meta.files()}
    whole = 0
    for episode in meta.episodes:
        needed = [("", episode.data), *((f"{camera}: ", clip.path) for camera, clip in episode.clips.items())]
        missing = next(((called, path) for called, path in needed if not there[path]), None)
        if missing:
            bad.add(f"{meta.folder}: episode {episode.number}", f"{missing[0]}'{missing[1]}' is missing")
        whole += not missing
    if not whole:
        raise UserError(f"{meta.folder}: the files of every episode are missing; copy them with the metadata")


def _folder(folder: Path) -> SourceFile:
    check_packages()
    meta, size, mtime = read_meta(folder), 0, 0
    for path in meta.files():
        if path.is_file():
            stat = path.stat()
            size, mtime = size + stat.st_size, max(mtime, stat.st_mtime_ns)
    real = folder.resolve()  # so that '.' has a name
    return SourceFile(str(real.parent), real.name, size, mtime)
