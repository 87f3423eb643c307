"""What Kunlun runs keeps to Python 3.10: its syntax, and what its standard library has.

tests/floor runs it on 3.10; this finds most of it where no such interpreter is installed.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent.parent
# Dotted names that came with 3.11 or 3.12 (docs.python.org, "What's New"), and modules of them.
LATER = {
    "tomllib": "3.11",
    "asyncio.Runner": "3.11",
    "asyncio.TaskGroup": "3.11",
    "asyncio.timeout": "3.11",
    "contextlib.chdir": "3.11",
    "datetime.UTC": "3.11",
    "enum.ReprEnum": "3.11",
    "enum.StrEnum": "3.11",
    "enum.member": "3.11",
    "enum.verify": "3.11",
    "hashlib.file_digest": "3.11",
    "inspect.getmembers_static": "3.11",
    "logging.getLevelNamesMapping": "3.11",
    "math.cbrt": "3.11",
    "math.exp2": "3.11",
    "operator.call": "3.11",
    "sys.exception": "3.11",
    "typing.LiteralString": "3.11",
    "typing.Never": "3.11",
    "typing.NotRequired": "3.11",
    "typing.Required": "3.11",
    "typing.Self": "3.11",
    "typing.TypeVarTuple": "3.11",
    "typing.Unpack": "3.11",
    "typing.assert_never": "3.11",
    "typing.assert_type": "3.11",
    "typing.reveal_type": "3.11",
    "typing.dataclass_transform": "3.11",
    "collections.abc.Buffer": "3.12",
    "itertools.batched": "3.12",
    "math.sumprod": "3.12",
    "os.process_cpu_count": "3.13",
    "sys.monitoring": "3.12",
    "typing.TypeAliasType": "3.12",
    "typing.override": "3.12",
}
# Methods, by names that hardly anything else has.
LATER_METHODS = {"add_note": "3.11", "walk_up": "3.12"}
# Keyword arguments of the standard library that came later.
LATER_KEYWORDS = {("rmtree", "onexc"): "3.12", ("relative_to", "walk_up"): "3.12", ("glob", "case_sensitive"): "3.12"}


def later(source: str) -> Iterator[str]:
    """What a module needs that Python 3.10 has not: its syntax errors, names, methods and keywords."""
    try:
        tree = ast.parse(source, feature_version=(3, 10))
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        yield from (f"line {node.lineno}: {name} of Python {LATER[name]}" for name in names if name in LATER)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = f"{modules.get(ast.unparse(node.value), '')}.{node.attr}"
            version = LATER.get(name) or LATER_METHODS.get(node.attr)
            if version:
                yield f"line {node.lineno}: {name} of Python {version}"
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for keyword in node.keywords:
                if version := LATER_KEYWORDS.get((called, keyword.arg)):
                    yield f"line {node.lineno}: {called}({keyword.arg}=) of Python {version}"
    yield from _reused_quotes(source)


def _reused_quotes(source: str) -> Iterator[str]:
    """Python 3.10 ends an f-string at its own quote, wherever that stands."""
    open_quotes: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        quote = token.string.lstrip("rRfFbBuU")
        if token.type == tokenize.FSTRING_END:
            open_quotes.pop()
        elif token.type in (tokenize.STRING, tokenize.FSTRING_START):
            if open_quotes and quote.startswith(open_quotes[-1]):
                yield f"line {token.start[0]}: an f-string that repeats its own quote, of Python 3.12"
            if token.type == tokenize.FSTRING_START:
                open_quotes.append(quote)


FILES = sorted(f for d in ("engine", "hardware", "zoo", "conf") for f in (REPO / d).rglob("*.py"))


def test_everything_that_kunlun_runs_is_python_3_10() -> None:
    assert len(FILES) > 100
    assert not {str(f.relative_to(REPO)): needs for f in FILES if (needs := list(later(f.read_text())))}


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    pass\nexcept* ValueError:\n    pass",
        "import tomllib",
        "from typing import Self",
        "from datetime import UTC",
        "import datetime as d\nd.UTC",
        "import enum\nclass A(enum.StrEnum): ...",
        "def f[T](x: T) -> T: ...",
        "type A = int",
        "error.add_note('x')",
        "import shutil\nshutil.rmtree('x', onexc=print)",
        "a = f'{x['y']}'",
    ],
)
def test_what_came_later_is_seen(code: str) -> None:
    assert list(later(code))
