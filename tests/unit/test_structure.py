"""Laws of the tree that import-linter cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent.parent
SHELVES = ("llm", "vlm", "diffusion", "embodied")
FAMILIES = {path.parent.name: path.parent for s in SHELVES for path in (REPO / "zoo" / s).glob("*/__init__.py")}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_imports_no_other(family: str) -> None:
    others = {f"zoo.{other}" for other in FAMILIES if other != family}
    for file in FAMILIES[family].rglob("*.py"):
        reached = {".".join(name.split(".")[:2]) for name in imports(file)}
        assert not reached & others, file


def test_only_hardware_names_a_device() -> None:
    forbidden = re.compile(r"""torch\.cuda|["']cuda(:\d+)?["']|["']nccl["']""")
    files = [f for d in ("engine", "zoo", "eval", "conf", "bench") for f in (REPO / d).rglob("*.py")]
    assert files
    assert not [f"{f}: {m[0]}" for f in files if (m := forbidden.search(f.read_text()))]


@pytest.mark.parametrize("shelf", SHELVES)
def test_a_family_has_one_import_name(shelf: str) -> None:
    with pytest.raises(ImportError, match="one import name"):
        __import__(f"zoo.{shelf}.anything")


def test_what_the_controller_touches_needs_no_torch() -> None:
    """The families' cards, configs and weight maps are read by a process that never imports torch."""
    names = [
        f"zoo.{n}.{m}" for n, folder in FAMILIES.items() for m in ("config", "weights") if (folder / f"{m}.py").exists()
    ]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.slow
def test_the_wheel_works_from_another_directory(tmp_path: Path) -> None:
    """It holds the recipes, leaves the tests out, and composes a run away from the checkout."""
    subprocess.run(["uv", "build", "--wheel", "-q", "-o", str(tmp_path), str(REPO)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.startswith(("tests/", "bench/", "docs/"))]
    site, place = tmp_path / "site", tmp_path / "place"
    place.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    check = "import engine; print(engine.__file__)"
    command = [sys.executable, "-m", "zoo.qwen3", "model=8b", "parallelism=tp4_pp2", "launcher=print", "hardware=cpu"]
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    where = subprocess.check_output([sys.executable, "-c", check], cwd=place, env=env, text=True)
    assert where.startswith(str(site))
    assert "8 ranks" in subprocess.check_output(command, cwd=place, env=env, text=True)
