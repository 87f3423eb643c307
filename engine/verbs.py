"""What `zoo WORD` and `python -m zoo WORD` do: the same commands. Never imports torch or transformers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn, Optional

from engine.errors import UserError
from engine.family import family_names, load_dotted
from engine.suggest import did_you_mean


@dataclass(frozen=True)
class Verb:
    """A command of its own: `run` takes the words behind it and gives the exit status."""

    run: str  # module:function
    usage: str
    about: str
    packages: tuple[str, ...] = ()  # of the extra `eval`, which it needs


WIRE = ("msgpack", "websockets")  # of the extra `eval`
VERBS = {
    "list": Verb("engine.catalogue:catalogue", "zoo list", "the families, their sizes, tasks, backends and references"),
    "doctor": Verb(
        "engine.doctor.command:doctor", "zoo doctor", "whether this machine is fit, and what would make it faster"
    ),
    "parity": Verb(
        "engine.parity.command:parity",
        "zoo parity A B",
        "whether two runs, of two machines for example, computed the same",
    ),
    "eval": Verb("eval.command:evaluation", "zoo eval", "how often a policy succeeds in a simulator's tasks", WIRE),
    "eval-env": Verb("eval.environments:command", "zoo eval-env NAME", "build the environment of a simulator"),
    "eval-merge": Verb("eval.command:merging", "zoo eval-merge A B", "one evaluation from its shards", WIRE),
    "demos": Verb("eval.demos.command:recording", "zoo demos", "record demonstrations of a scripted expert", WIRE),
    "demos-replay": Verb(
        "eval.demos.command:replaying", "zoo demos-replay DIR", "carry recorded actions out again", WIRE
    ),
    "serve": Verb("eval.command:serving", "zoo serve", "serve a policy over a websocket", WIRE),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of a user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows what there is")


def read_words(prog: str, text: str, words: list[str]) -> Optional[tuple[list[str], bool]]:
    """The words of a verb without its flags, and whether --json is among these; None if they only asked for the help,
    which is then printed. UserError for an unknown flag."""
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_intermixed_args(words)
    if options.help:
        print(text)
        return None
    return options.words, options.json


def run_verb(name: str, words: list[str]) -> int:
    """The exit status of a verb's command."""
    verb = VERBS[name]
    if missing := [package for package in verb.packages if find_spec(package) is None]:
        raise UserError(f"zoo {name} needs {' and '.join(missing)}: install the extra `eval`")
    return load_dotted(verb.run)(words)


def check_word(word: str) -> None:
    """UserError, with the nearest words, for one that is neither a verb nor a family."""
    known = [*VERBS, *family_names()]
    if word not in known:
        raise UserError(
            f"'{word}' is neither a command of zoo ({', '.join(VERBS)}) nor a model family{did_you_mean(word, known)} "
            "(`zoo list` shows the families)"
        )
