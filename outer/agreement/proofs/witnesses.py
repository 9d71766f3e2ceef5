"""Whose signatures and claims count for this island, so that a member gains nothing by inventing islands.

An island counts if `island.allow` lists its key, or, without such a list, if it is known from a commit: this island
took part in it, or took the state that it led to, or enough islands that were known before took part in it. Such a
certificate introduces its other participants, and is kept to introduce them to islands that were away.

Every island counts (a) for an island that knows no other from a commit, because it cannot tell, (b) beside more than
half of the others that it knows, at least two, and (c) for an island that is held up longer than honest islands need to
commit: otherwise one that knows too few, or only those that have died since, would never follow the others.
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
    """Public keys by island, the one known for the longest time first."""
    introductions: list[Certificate] = field(default_factory=list)
    """The certificates from which they are known, the last MAX_INTRODUCTIONS."""

    @property
    def num_others(self) -> int:
        """How many other islands this one knows from commits."""
        return len(set(self.known.values()) - {self.signer.public})

    def count(self, islands: Iterable[tuple[str, str]], *, is_held_up: bool = False) -> int:
        """How many of these islands, given with their keys, count. A key counts once."""
        islands = list(islands)
        counting = self._find_counting(islands, can_tell=True)
        num_known, num_others = len(counting - {self.signer.public}), self.num_others
        are_most = num_known >= 2 and 2 * num_known > num_others
        if num_others == 0 or is_held_up or are_most:
            counting = self._find_counting(islands, can_tell=False)
        return len(counting)

    def admit(self, certificate: Certificate) -> None:
        """This island has committed what the certificate says, or holds the state that it proves."""
        keys = certificate.keys
        if all(self.known.get(island) == key for island, key in keys.items()):
            return
        self.known = {name: key for name, key in self.known.items() if name not in keys} | keys
        self.known = dict(list(self.known.items())[-MAX_KNOWN:])
        self.introductions = [*self.introductions, certificate][-MAX_INTRODUCTIONS:]

    def introduce(self, certificates: Iterable[Certificate], needed: int) -> None:
        """Admit the participants of each certificate that `needed` islands have signed which count by then."""
        for certificate in certificates if self.num_others else ():
            with suppress(MessageError):
                certificate.check_form()
                keys = certificate.keys
                is_news = any(self.known.get(island) != key for island, key in keys.items())
                if is_news and self._agrees_with(keys) and self.count(keys.items()) >= needed:
                    certificate.check(self.signer.verify, frozenset(self.known.values()))
                    self.admit(certificate)

    def _agrees_with(self, keys: Mapping[str, str]) -> bool:
        """Whether these islands' names belong to these keys as far as this island knows."""
        return all(self.known.get(island, key) == key for island, key in keys.items())

    def _find_counting(self, islands: Iterable[tuple[str, str]], *, can_tell: bool) -> set[str]:
        """Keys of those islands that count. `can_tell`: whether only known ones do."""
        return {key for island, key in islands if self._counts(island, key, can_tell=can_tell)}

    def _counts(self, island: str, key: str, *, can_tell: bool) -> bool:
        trusted = self.signer.trusts(island, key)
        if trusted is not None:
            return trusted
        if key == self.signer.public:
            return True
        return self.known.get(island) == key if can_tell else self.signer.key_of(island) in (None, key)
