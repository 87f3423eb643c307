"""What a misspelt key or value might have meant, and what a value should have been."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from omegaconf import (
    AnyNode,
    BooleanNode,
    DictConfig,
    FloatNode,
    IntegerNode,
    ListConfig,
    Node,
    OmegaConf,
    StringNode,
)

TYPES: dict[type, str] = {
    BooleanNode: "true or false",
    IntegerNode: "a whole number",
    FloatNode: "a number",
    StringNode: "text",
    ListConfig: "a list in square brackets, like [0.9,0.95]",
    DictConfig: "a mapping like {key: value}",
    AnyNode: "a value",
}

MOST_DIGITS = 18  # of a number that is spelled out: more is no setting

# What other tools call the same things.
SYNONYMS = {
    "learning_rate": "lr",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_iters": "steps",
    "batch_size": "global_batch_size",
    "grad_clip": "clip_grad",
    "max_grad_norm": "clip_grad",
    "seq_length": "seq_len",
    "max_length": "seq_len",
    "output": "output_dir",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "gpus": "nproc_per_node",
}


def expected_type(node: Node) -> str:
    """What a node takes, in words."""
    word = next((text for kind, text in TYPES.items() if isinstance(node, kind)), "another type")
    return f"{word} or null" if node._is_optional() else word


def whole_number(node: Node, text: str) -> str:
    """`; write 1000`, for a text like 1e3 or 1000.0 where a whole number, or a list of them, is wanted; or nothing."""
    try:
        if isinstance(node, IntegerNode):
            return f"; write {_whole(text)}"
        element = node._metadata.element_type if isinstance(node, ListConfig) else None
        if element is int and text[:1] + text[-1:] == "[]":
            return f"; write [{','.join(map(_whole, text[1:-1].split(',')))}]"
    except (ValueError, ArithmeticError):
        pass
    return ""


def _whole(text: str) -> str:
    """The digits of a number without a fraction. ValueError or ArithmeticError for anything else."""
    number = Decimal(text.strip())
    if number != number.to_integral_value() or number.adjusted() > MOST_DIGITS:
        raise ValueError(text)
    return str(int(number))


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known words that look like `word`, the likeliest first; case and the characters `_-.` do not matter."""
    plain: dict[str, list[str]] = {}
    for name in known:
        plain.setdefault(_plain(name), []).append(name)
    close = difflib.get_close_matches(_plain(word), plain, count, 0.6)
    return [name for match in close for name in plain[match]][:count]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 8b?`, or nothing."""
    return _question(nearest(word, known))


def _question(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(".", "")


class Keys:
    """The dotted keys of a composed config."""

    def __init__(self, config: DictConfig, groups: tuple[str, ...]) -> None:
        self.nodes = dict(_walk(config, ""))
        self.groups = groups

    def node(self, key: str) -> Node | None:
        """The node of a key, or the mapping that a key may be added to."""
        if key in self.nodes:
            return self.nodes[key]
        return self.nodes[key.rpartition(".")[0]] if self.is_open(key) else None

    def is_open(self, key: str) -> bool:
        """Whether `key` is an entry, present or not, of a mapping that takes any key."""
        parent: Any = self.nodes.get(key.rpartition(".")[0])
        return isinstance(parent, DictConfig) and OmegaConf.get_type(parent) in (dict, type(None))

    def near(self, key: str) -> str:
        """A question about what `key` may have meant: the same name at another level first, then similar ones."""
        leaf = key.rpartition(".")[2]
        leaf = SYNONYMS.get(leaf, leaf)
        leaves = [name for name in self.nodes if not name.endswith(".name")]
        if same := [name for name in leaves if name.rpartition(".")[2] == leaf]:
            return _question(same[:3])
        group, dot, rest = key.partition(".")
        if dot and group in self.nodes:
            # The group is right: look inside it before looking everywhere.
            inside = [name.removeprefix(f"{group}.") for name in leaves if name.startswith(f"{group}.")]
            if close := nearest(rest, inside):
                return _question([f"{group}.{name}" for name in close])
        by_leaf = {name.rpartition(".")[2]: name for name in leaves}
        close = nearest(key, {*leaves, *self.groups}) or [by_leaf[name] for name in nearest(leaf, by_leaf)]
        return _question(close) or "; --help lists the keys"


def _walk(config: DictConfig, prefix: str) -> Iterator[tuple[str, Node]]:
    for name in config:
        node = config._get_node(name)
        yield f"{prefix}{name}", node
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from _walk(node, f"{prefix}{name}.")
