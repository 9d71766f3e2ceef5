"""Finds the functions in our code that turn bytes or text into values, and those that the seeds of
all groups reach.

python -m tests.fuzz.decoders     prints the latter, one a line: module:function
"""

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PLACES = ("outer", "diloco/status", "diloco/watch/collection", "diloco/checkpoints",
"diloco/config/from_swarm.py",
          "inner/checkpoint", "inner/foreign/text.py")  # fmt: skip
"""What hears or reads others: islands, donors, watchers, operators, and who writes to a mirror."""
PARSERS = {
    "validate_json", "model_validate", "model_validate_json", "validate_python", "parse_json",
    "parse_yaml",
    "parse_record", "parse_pickle", "genops", "loads", "frombuffer", "from_bytes", "fromhex",
    "unpack", "unpack_mean",
    "unseal", "strip_seal", "decompress", "decompressobj", "from_base58", "Multiaddr",
    "parse_header", "unpack_call",
    "text_of",
}  # fmt: skip
"""Functions and methods whose callers decode. Those of messages are not here: every kind of message
is fuzzed.
"""
LOADERS = {"torch.load", "yaml.load"}


def find_decoders() -> Iterator[str]:
    """The functions that call one of PARSERS, as `module:function`."""
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            for name, node in _functions(ast.parse(file.read_text())):
                if any(
                    _name_of(each) in PARSERS or ast.unparse(each.func) in LOADERS
                    for each in _own_calls(node)
                ):
                    yield f"{module}:{name}"


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            is_class = isinstance(node, ast.ClassDef)
            yield from _functions(node, f"{name}." if is_class else f"{name}.<locals>.")


def _own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """The calls in a function, without those in functions within it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if isinstance(node, ast.Call):
                yield node
            yield from _own_calls(node)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def reach() -> set[str]:
    """The functions that decoding all seeds calls, in all threads."""
    reached: set[str] = set()

    def note(frame: FrameType, event: str, about: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            module = Path(file).relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            reached.add(f"{module}:{frame.f_code.co_qualname}")

    threading.setprofile(note)  # Before the first of them begins.
    from tests.fuzz.groups import GROUPS

    groups = [build() for build in GROUPS.values()]
    sys.setprofile(note)
    for entries in groups:
        for entry in entries.values():
            for seed in entry.seeds:
                try:
                    entry.decode(seed)
                except entry.errors:
                    continue
    sys.setprofile(None)
    return reached


if __name__ == "__main__":
    print("\n".join(sorted(reach())))
