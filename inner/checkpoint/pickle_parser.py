"""Parse a pickle into plain data without running it. Nothing here imports, calls or builds what the
pickle names.

A pickle is a program for a stack machine, and Python's own unpickler calls any function that the
program names. This parser knows only the instructions that build data, and refuses names that the
caller does not expect. A name becomes a `Name`, and a call becomes a `Call` that records what
Python would have called. Its memory use is proportional to the size of the pickle.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


class PickleError(ValueError):
    """The bytes are not a pickle of plain data."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function, as `module.name`."""

    text: str


@dataclass(slots=True, eq=False)
class Call:
    """A call of `function` with `args`, which may build an object; `state` holds the attributes
    that the object would get.
    """

    function: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class Pairs:
    """The keys and values of a dict, in order. A key may occur twice."""

    items: list[tuple[Any, Any]]


MARK = object()
"""The mark on the stack before the first item of a sequence."""
CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": MARK, "EMPTY_TUPLE": ()
}  # fmt: skip
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
"""Instructions that push their own argument, a number or a text."""


def parse_pickle(raw: bytes, known: Collection[str]) -> Any:
    """Return the data in a pickle: None, bool, int, str, list, tuple, and the classes above.

    Raises PickleError if the bytes are anything else, or name a class or function that is not in
    `known`.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    try:
        for instruction, argument, _ in pickletools.genops(raw):
            name = instruction.name
            if name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in ("BINGET", "LONG_BINGET") and isinstance(argument, int):
                stack.append(memo[argument])
            elif name == "STACK_GLOBAL":
                stack.append(_pop_name(stack, known))
            elif name in VALUES:
                stack.append(argument)
            elif name in CONSTANTS:
                stack.append(CONSTANTS[name])
            elif name in ACTIONS:
                ACTIONS[name](stack)
            elif name == "STOP":
                (value,) = stack
                return value
            elif name not in ("PROTO", "FRAME"):
                raise PickleError(f"it has the instruction {name}, which plain data does not need")
    except PickleError:
        raise
    except (ValueError, IndexError, TypeError) as error:
        raise PickleError(f"not a pickle of plain data ({error})") from None
    raise PickleError("it has no end")


def _pop(stack: list[Any], kind: type) -> Any:
    value = stack.pop()
    if not isinstance(value, kind):
        raise PickleError(f"got {type(value).__name__} where {kind.__name__} is expected")
    return value


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (value := stack.pop()) is not MARK:
        items.append(value)
    return items[::-1]


def _set_items(stack: list[Any], flat: list[Any]) -> None:
    pairs = _pop(stack, Pairs)
    pairs.items.extend(zip(flat[::2], flat[1::2], strict=True))
    stack.append(pairs)


def _append(stack: list[Any], values: list[Any]) -> None:
    target = _pop(stack, list)
    target.extend(values)
    stack.append(target)


def _pop_name(stack: list[Any], known: Collection[str]) -> Name:
    name = _pop(stack, str)
    module = _pop(stack, str)
    if (text := f"{module}.{name}") not in known:
        raise PickleError(f"it names {text[:100]}")
    return Name(text)


def _push_call(stack: list[Any]) -> None:
    args = _pop(stack, tuple)
    function = _pop(stack, Name)
    stack.append(Call(function.text, args))


def _set_state(stack: list[Any]) -> None:
    state = stack.pop()
    call = _pop(stack, Call)
    call.state = state
    stack.append(call)


def _push_last(stack: list[Any], count: int) -> None:
    items = [stack.pop() for _ in range(count)]
    stack.append(tuple(items[::-1]))


ACTIONS: dict[str, Callable[[list[Any]], None]] = {
    "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_DICT": lambda stack: stack.append(Pairs([])),
    "TUPLE": lambda stack: stack.append(tuple(_pop_to_mark(stack))),
    "TUPLE1": lambda stack: _push_last(stack, 1),
    "TUPLE2": lambda stack: _push_last(stack, 2),
    "TUPLE3": lambda stack: _push_last(stack, 3),
    "APPEND": lambda stack: _append(stack, [stack.pop()]),
    "APPENDS": lambda stack: _append(stack, _pop_to_mark(stack)),
    "SETITEM": lambda stack: _set_items(stack, [stack.pop(), stack.pop()][::-1]),
    "SETITEMS": lambda stack: _set_items(stack, _pop_to_mark(stack)),
    "REDUCE": _push_call,
    "NEWOBJ": _push_call,
    "BUILD": _set_state,
}
"""The effect of each remaining instruction on the stack."""
