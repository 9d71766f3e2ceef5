"""What command lines of several benchmarks share."""

import argparse
from collections.abc import Callable, Collection


def choices(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of `allowed`, with commas between."""

    def split(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"got {word!r}; allowed: {', '.join(allowed)}")
        return words

    return split
