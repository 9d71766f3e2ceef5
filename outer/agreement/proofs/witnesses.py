"""Rules for which islands' signatures and claims count, so that a member gains nothing by inventing
islands.

An island counts if `island.allow` lists its key. Without such a list it counts if it is known from
a commit: this island took part in the commit, or took the resulting state, or enough islands that
were known before took part in it. A certificate that makes islands known is kept, to introduce them
to islands that were unreachable.

Every island counts in three cases: (a) this island knows no other island from a commit, so it
cannot distinguish; (b) at least two, and more than half, of the known islands are among those that
are counted; (c) this island is delayed for longer than honest islands need to commit. Without (c),
an island that knows too few others, or only dead ones, would never follow the rest.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from outer.agreement.proofs.certificate import MAX_INTRODUCTIONS, Certificate
from outer.agreement.proofs.signer import Signer
from outer.errors import MessageError

MAX_KNOWN = 4096


@dataclass
class Witnesses:
    """The islands that this one knows from commits. The values of its tables are immutable."""

    signer: Signer
    known: dict[str, str] = field(default_factory=dict)
    """Public keys by island, with the island known for the longest time first."""
    introductions: list[Certificate] = field(default_factory=list)
    """The last MAX_INTRODUCTIONS certificates from which the islands in `known` became known."""

    @property
    def num_others(self) -> int:
        """The number of other islands that this one knows from commits."""
        return len(set(self.known.values()) - {self.signer.public})

    def count(self, islands: Iterable[tuple[str, str]], *, is_held_up: bool = False) -> int:
        """Return how many of these islands, given with their keys, count. A repeated key counts
        once.
        """
        islands = list(islands)
        counting = self._find_counting(islands, can_tell=True)
        num_known = len(counting - {self.signer.public})
        num_others = self.num_others
        are_most = num_known >= 2 and 2 * num_known > num_others
        if num_others == 0 or is_held_up or are_most:
            counting = self._find_counting(islands, can_tell=False)
        return len(counting)

    def admit(self, certificate: Certificate) -> None:
        """Make a certificate's participants known: this island has committed its plan, or holds
        the state that it proves.
        """
        keys = certificate.keys
        if all(self.known.get(island) == key for island, key in keys.items()):
            return
        self.known = {name: key for name, key in self.known.items() if name not in keys} | keys
        self.known = dict(list(self.known.items())[-MAX_KNOWN:])
        self.introductions = [*self.introductions, certificate][-MAX_INTRODUCTIONS:]

    def introduce(self, certificates: Iterable[Certificate], needed: int) -> None:
        """Admit the participants of each certificate that at least `needed` islands which count
        by then have signed.
        """
        for certificate in certificates if self.num_others else ():
            with suppress(MessageError):
                certificate.check_form()
                keys = certificate.keys
                is_news = any(self.known.get(island) != key for island, key in keys.items())
                if is_news and self._agrees_with(keys) and self.count(keys.items()) >= needed:
                    certificate.check(self.signer.verify, frozenset(self.known.values()))
                    self.admit(certificate)

    def _agrees_with(self, keys: Mapping[str, str]) -> bool:
        """Return whether these names and keys contradict none that this island knows."""
        return all(self.known.get(island, key) == key for island, key in keys.items())

    def _find_counting(self, islands: Iterable[tuple[str, str]], *, can_tell: bool) -> set[str]:
        """Return the keys of the islands that count. `can_tell`: only known islands count."""
        return {key for island, key in islands if self._counts(island, key, can_tell=can_tell)}

    def _counts(self, island: str, key: str, *, can_tell: bool) -> bool:
        trusted = self.signer.trusts(island, key)
        if trusted is not None:
            return trusted
        if key == self.signer.public:
            return True
        return (
            self.known.get(island) == key if can_tell else self.signer.key_of(island) in (None, key)
        )
