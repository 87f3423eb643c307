"""Laws of the tree that import-linter cannot see."""

from __future__ import annotations

import ast
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


DEVICES = ("cuda", "nccl")


def devices_named(tree: ast.AST) -> list[str]:
    """What ties code to one kind of device: torch.cuda however it is reached, .cuda() calls, names of both."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch":
            found.append("torch.cuda")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            found.append(".cuda(")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in DEVICES:
            found.append(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{getattr(node, 'module', '') or ''}."
            names = [f"{module}{alias.name}".lstrip(".") for alias in node.names]
            found += [name for name in names if name == "torch.cuda" or name.startswith("torch.cuda.")]
    return found


def test_only_hardware_names_a_device() -> None:
    files = [f for d in ("engine", "zoo", "eval", "conf", "bench") for f in (REPO / d).rglob("*.py")]
    assert files
    assert not {str(f): named for f in files if (named := devices_named(ast.parse(f.read_text())))}


@pytest.mark.parametrize(
    "code, named",
    [
        ("torch.cuda.synchronize()", ["torch.cuda"]),
        ("x.cuda()", [".cuda("]),
        ("x.to('cuda:1')", ["cuda:1"]),
        ('device = "cuda"', ["cuda"]),
        ("init_process_group('nccl')", ["nccl"]),
        ("import torch.cuda", ["torch.cuda"]),
        ("from torch import cuda", ["torch.cuda"]),
        ("from torch.cuda import Stream", ["torch.cuda.Stream"]),
        ("def f(x):\n    return [t.cuda(0) for t in x]", [".cuda("]),
        ("'cudagraphs and torch.cuda in words'; hardware.device(0)", []),
    ],
)
def test_each_way_to_name_a_device_is_seen(code: str, named: list[str]) -> None:
    assert devices_named(ast.parse(code)) == named


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
