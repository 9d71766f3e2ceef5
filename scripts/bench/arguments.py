"""What command lines of several benchmarks share."""

import argparse
from collections.abc import Callable, Collection

PLAIN = "outer.optimizer={lr: 1.0, momentum: 0.0, nesterov: false}"
"""In a run's overrides: the plain mean of the islands' params, without outer momentum."""


def choices(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of `allowed`, with commas between."""

    def split(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"got {word!r}; allowed: {', '.join(allowed)}")
        return words

    return split


def whole_numbers(text: str) -> list[int]:
    """A type for argparse: whole numbers with commas between."""
    return [int(word) for word in text.split(",")]
