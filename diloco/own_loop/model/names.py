"""Names of an island's parameters, and their order, which no rank of an interleaved pipeline knows
alone.
"""

from collections.abc import Sequence
from itertools import pairwise

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Words that recomputation and torch.compile put into names. Islands may differ in both."""


def clean_name(name: str) -> str:
    """Return the name without the words of wrappers.

    >>> clean_name("layers.0._checkpoint_wrapped_module.wq._orig_mod.weight")
    'layers.0.wq.weight'
    """
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def merge_orders(orders: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of all ranks in one order, given the order in which each rank has its own.

    Names are compared word by word. Words that follow the same words are ordered as numbers if they
    are numbers, otherwise as the ranks have them. So the order is that of the whole model, whose
    lists are numbered, on every layout of its layers.

    >>> merge_orders([["embed", "layers.0.w", "layers.2.w"], ["layers.1.w", "layers.10.w", "norm"]])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.10.w', 'norm']
    """
    alike = list(dict.fromkeys(tuple(order) for order in orders))
    after: dict[tuple[str, ...], list[list[str]]] = {}
    for order in alike:
        for start, words in _words_after(order).items():
            after.setdefault(start, []).append(words)
    places = {
        start: {word: place for place, word in enumerate(_merge_words(lists))}
        for start, lists in after.items()
    }

    def place_of(name: str) -> list[int]:
        words = name.split(".")
        return [places[tuple(words[:depth])][word] for depth, word in enumerate(words)]

    return sorted({name for order in alike for name in order}, key=place_of)


def _words_after(order: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Return for each beginning of names the distinct words that follow it, in the order of the
    names.
    """
    after: dict[tuple[str, ...], dict[str, None]] = {}
    for name in order:
        words = name.split(".")
        for depth, word in enumerate(words):
            after.setdefault(tuple(words[:depth]), {})[word] = None
    return {start: list(words) for start, words in after.items()}


def _merge_words(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return all words in one order that agrees with every list, except that numbers ascend.

    Of several words that could be next, the first to appear in the lists is. If no such order
    exists, the first word to appear is next.
    """
    words = list(dict.fromkeys(word for each in lists for word in each))
    numbers = sorted((word for word in words if word.isdecimal()), key=int)
    if len(numbers) == len(words):
        return numbers
    before: dict[str, set[str]] = {word: set() for word in words}
    for each in [*lists, numbers]:
        for word, following in pairwise(each):
            if each is numbers or not (word.isdecimal() and following.isdecimal()):
                before[following].add(word)
    merged: list[str] = []
    while before:
        free = [word for word, earlier in before.items() if not earlier & before.keys()]
        merged.append(free[0] if free else next(iter(before)))
        del before[merged[-1]]
    return merged
