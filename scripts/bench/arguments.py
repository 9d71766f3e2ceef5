"""Command-line arguments that several benchmarks share."""

import argparse
from collections.abc import Callable, Collection

PLAIN = "outer.optimizer={lr: 1.0, momentum: 0.0, nesterov: false}"
"""Override that makes the outer step the plain mean of the islands' params, without outer momentum."""


def choices(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Build an argparse type that accepts a comma-separated list of words from `allowed`."""

    def split(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"got {word!r}; allowed: {', '.join(allowed)}")
        return words

    return split


def whole_numbers(text: str) -> list[int]:
    """Argparse type for a comma-separated list of whole numbers."""
    return [int(word) for word in text.split(",")]
