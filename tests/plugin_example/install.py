"""What pip would leave of the example: its module, and a dist-info folder with its entry points."""

from __future__ import annotations

import shutil
from pathlib import Path

import tomllib

HERE = Path(__file__).parent


def install(site: Path, **entry_points: str) -> Path:
    """Install the example into the folder `site`, which is for sys.path. `entry_points` stand in for its own."""
    site.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    ((group, own),) = project["entry-points"].items()
    shutil.copy(HERE / "zooforge_example.py", site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {target}" for name, target in (entry_points or own).items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(lines) + "\n")
    return site
