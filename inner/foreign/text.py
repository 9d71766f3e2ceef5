"""JSON and YAML from other people, parsed within limits."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from inner.errors import InputError
from inner.foreign.files import read_file

MAX_JSON_BYTES = 1 << 25
"""Size limit of a file of settings or an index. The index of a model with 91,000 tensors has 9
MB."""
FREE_BYTES = 1 << 24
"""The values of shorter JSON are not counted, because it takes at most some 500 MB of memory."""
MAX_VALUES = 1 << 25
MAX_YAML_CHARS = 1 << 22
MAX_YAML_NODES = 1 << 18
MAX_YAML_DEPTH = 64
MAX_DIGITS = 400


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also if it is nested too deeply or has
    too many values.
    """
    if len(data) > FREE_BYTES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} commas and brackets")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, what: str) -> Any:
    """Return the value in a JSON file of at most 32 MiB. Raises OSError, and InputError if it is
    not `what` it should be.
    """
    try:
        return parse_json(read_file(path, MAX_JSON_BYTES))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: not {what} ({error}); copy it again") from None


def parse_yaml(text: str, *, anchors: bool = True, most_chars: int = MAX_YAML_CHARS) -> Any:
    """Return the value of a YAML text in plain types. Raises ValueError, also if it is longer or
    deeper than a config is.

    The values of an alias are counted at each use, because with aliases a short text can stand for
    gigabytes. If `anchors` is False, anchors and aliases are refused. A key that stands twice in
    one section is refused, because one of its values would be lost.
    """
    if len(text) > most_chars:
        raise ValueError(f"it has {len(text)} characters, but a config has at most {most_chars}")
    try:
        return yaml.load(text, partial(_BoundedLoader, anchors))  # pyright: ignore[reportArgumentType]
    except yaml.YAMLError as error:
        raise ValueError(_explain(error)) from None
    except (RecursionError, TypeError, OverflowError, LookupError, AttributeError) as error:
        # The library raises these errors for an unhashable key, or for an invalid date or number.
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _explain(error: yaml.YAMLError) -> str:
    """Return the error in one line: the place in the text, what is wrong there, and a cure where
    the library's words name none.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = str(getattr(error, "problem", "") or "it cannot be read")
    if "'\\t'" in problem:
        problem = "a tab; indent with spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(problem.split())}"


class _BoundedLoader(yaml.SafeLoader):
    """A YAML loader that counts nodes and levels while it reads, and refuses a key that stands
    twice.
    """

    def __init__(self, allows_anchors: bool, text: str) -> None:
        super().__init__(text)
        self._allows_anchors = allows_anchors
        self._num_nodes = self._depth = 0
        self._sizes: dict[str, int] = {}
        """Number of nodes that each anchor stands for."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        anchor = str(getattr(event, "anchor", None) or "")
        if anchor and not self._allows_anchors:
            raise yaml.YAMLError("anchors are not allowed")
        if self.check_event(yaml.AliasEvent):
            self._count(self._sizes.get(anchor, MAX_YAML_NODES))
            return super().compose_node(parent, index)
        before = self._num_nodes
        self._count(1)
        self._depth += 1
        if self._depth > MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_YAML_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor:
            self._sizes[anchor] = self._num_nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                where = f"line {lines[key.value]} and again in line {line}"
                raise yaml.YAMLError(f"key {key.value!r} stands in {where}; keep one of them")
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"a number has more than {MAX_DIGITS} digits")
        return super().construct_yaml_int(node)

    def _count(self, nodes: int) -> None:
        self._num_nodes += nodes
        if self._num_nodes > MAX_YAML_NODES:
            raise yaml.YAMLError(
                f"it has more than {MAX_YAML_NODES} values, including the values that its aliases "
                "repeat"
            )


_BoundedLoader.add_constructor("tag:yaml.org,2002:int", _BoundedLoader.construct_yaml_int)
