"""Comparison of the texts of the run's islands, by the fingerprints in their records."""

import logging
from collections.abc import Mapping

from outer.membership.base import Member, TextPrint

log = logging.getLogger(__name__)

NAMED = 8
"""Number of islands with other text that are named in a warning, so that a stranger with many
names does not fill the log."""


class TextComparison:
    """Warns once per island whose text differs from this one's."""

    def __init__(self, own: TextPrint | None) -> None:
        """Create a comparison. `own`: None if this island publishes no fingerprint, in which
        case nothing is compared.
        """
        self._own = own
        self._told = set[str]()

    def look(self, members: Mapping[str, Member]) -> None:
        """Compare this island's text with the text in the records of others."""
        own = self._own
        if own is None:
            return
        for name, member in members.items():
            theirs = member.text
            if theirs in (None, own) or name in self._told or len(self._told) >= NAMED:
                continue
            self._told.add(name)
            log.warning(
                "the text of %s differs from this island's: %s there, %s here. Units of data are "
                "numbers, so islands may then read a sequence twice and another never, and their "
                "held-out losses do not compare: give all the same files (data.paths, "
                "island.data_paths, mixture_paths) and tokenizer",
                name,
                theirs,
                own,
            )
