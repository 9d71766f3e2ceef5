"""Regular expressions for names, matched in time that does not grow exponentially with the length
of the name.

A config may come from a swarm, and Python's `re` tries every way to match one after the other:
`(\\w+\\.?)+x!` never finishes on a name. The matcher here follows all ways at once, as a set of
places in the name. It finds only whether a pattern matches, and keeps no groups.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from re import _constants as ops  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

MAX_LENGTH = 300
MAX_NESTED_REPEATS = 3
MAX_DEPTH = 20

Places = set[int]
Item = tuple[Any, Any]
"""An instruction of Python's parser, and its argument."""


class NamePattern:
    """A regular expression that is searched for in names.

    >>> pattern = NamePattern(r"^layers\\.\\d+\\.")
    >>> pattern.is_in("layers.11.norm"), pattern.is_in("my.layers.1.norm")
    (True, False)
    """

    def __init__(self, pattern: str) -> None:
        """Parse the pattern. Raises ValueError with the reason if it is not valid, or uses a
        feature that is not supported here.
        """
        if len(pattern) > MAX_LENGTH:
            raise ValueError(
                f"it has {len(pattern)} characters, but at most {MAX_LENGTH} are allowed"
            )
        try:
            self._items = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if self._items.state.flags & ~re.UNICODE:
            raise ValueError("it sets flags, as (?i) does, which are not supported here")
        _check(self._items, 0, 0)

    def is_in(self, name: str) -> bool:
        """Return whether a part of the name matches."""
        return bool(_ends(self._items, name, set(range(len(name) + 1))))


def _check(items: Iterable[Item], depth: int, repeats: int) -> None:
    """Raise ValueError unless all instructions are supported and they are not nested too deeply."""
    for op, argument in items:
        if op not in STEPS:
            raise ValueError(f"it needs {str(op).lower()}, which is not supported here")
        if op is ops.SUBPATTERN and (argument[1] or argument[2]):
            raise ValueError("it sets flags, as (?i:...) does, which are not supported here")
        if op is ops.ASSERT or op is ops.ASSERT_NOT:
            _check_width(*argument)
        nested = repeats + (op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[1] > 1)
        if depth > MAX_DEPTH or nested > MAX_NESTED_REPEATS:
            raise ValueError(
                f"it has repeats nested more than {MAX_NESTED_REPEATS} deep, or is nested too "
                "deeply"
            )
        for within in _within(op, argument):
            _check(within, depth + 1, nested)


def _within(op: Any, argument: Any) -> Iterator[Iterable[Item]]:
    """Yield the sequences of instructions inside an instruction."""
    if op is ops.BRANCH:
        yield from argument[1]
    elif op in (ops.SUBPATTERN, ops.MAX_REPEAT, ops.MIN_REPEAT, ops.ASSERT, ops.ASSERT_NOT):
        yield argument[-1]


def _check_width(direction: int, items: Any) -> None:
    shortest, longest = items.getwidth()
    if direction < 0 and shortest != longest:
        raise ValueError("it has a look-behind without a fixed length")


def _ends(items: Iterable[Item], name: str, starts: Places) -> Places:
    """Return the places where a match of all items, one after the other, may end if it begins at
    one of `starts`.
    """
    for op, argument in items:
        if not starts:
            break
        starts = STEPS[op](argument, name, starts)
    return starts


def _one_character(fits: Callable[[Any, str], bool]) -> Callable[[Any, str, Places], Places]:
    def step(argument: Any, name: str, starts: Places) -> Places:
        return {place + 1 for place in starts if place < len(name) and fits(argument, name[place])}

    return step


def _is_in_set(items: list[Item], character: str) -> bool:
    is_negated = items[0][0] is ops.NEGATE
    return is_negated != any(_fits_one(item, character) for item in items[is_negated:])


def _fits_one(item: Item, character: str) -> bool:
    op, argument = item
    if op is ops.CATEGORY:
        return CATEGORIES[argument](character)
    first, last = argument if op is ops.RANGE else (argument, argument)
    return first <= ord(character) <= last


def _branch(argument: Any, name: str, starts: Places) -> Places:
    return set().union(*(_ends(items, name, starts) for items in argument[1]))


def _repeat(argument: Any, name: str, starts: Places) -> Places:
    least, most, items = argument
    for _ in range(least):
        before = starts
        starts = _ends(items, name, starts)
        # After as many repeats as the name has characters, no new place can be reached.
        if starts == before:
            break
    reached = set(starts)
    new = starts
    for _ in range(most - least):
        new = _ends(items, name, new) - reached
        if not new:
            break
        reached |= new
    return reached


def _at(where: Any, name: str, starts: Places) -> Places:
    return {place for place in starts if BORDERS[where](name, place)}


def _looks(is_wanted: bool) -> Callable[[Any, str, Places], Places]:
    def step(argument: Any, name: str, starts: Places) -> Places:
        direction, items = argument
        back = items.getwidth()[0] if direction < 0 else 0
        found = {p for p in starts if p >= back and _ends(items, name, {p - back})}
        return found if is_wanted else starts - found

    return step


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_border(name: str, place: int) -> bool:
    return _is_word(name[place - 1 : place] or " ") != _is_word(name[place : place + 1] or " ")


CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    ops.CATEGORY_WORD: _is_word,
    ops.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
}
BORDERS: dict[Any, Callable[[str, int], bool]] = {
    ops.AT_BEGINNING: lambda name, place: place == 0,
    ops.AT_BEGINNING_STRING: lambda name, place: place == 0,
    ops.AT_END: lambda name, place: name[place:] in ("", "\n"),
    ops.AT_END_STRING: lambda name, place: place == len(name),
    ops.AT_BOUNDARY: _is_border,
    ops.AT_NON_BOUNDARY: lambda name, place: not _is_border(name, place),
}
STEPS: dict[Any, Callable[[Any, str, Places], Places]] = {
    ops.LITERAL: _one_character(lambda code, character: ord(character) == code),
    ops.NOT_LITERAL: _one_character(lambda code, character: ord(character) != code),
    ops.ANY: _one_character(lambda _, character: character != "\n"),
    ops.IN: _one_character(_is_in_set),
    ops.BRANCH: _branch,
    ops.SUBPATTERN: lambda argument, name, starts: _ends(argument[-1], name, starts),
    ops.MAX_REPEAT: _repeat,
    ops.MIN_REPEAT: _repeat,
    ops.AT: _at,
    ops.ASSERT: _looks(True),
    ops.ASSERT_NOT: _looks(False),
}
"""For each instruction: a function that maps the places before it to the places after it."""
