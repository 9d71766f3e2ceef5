"""Find what an operator wants to be told at once, from the account of a run.

Each trouble is told once until it is over.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.config.island import AlertsConfig
from diloco.formatting import human_bytes, human_duration, percent
from diloco.overview.account import RunAccount
from diloco.overview.incidents import DISAGREEMENT, Incident

MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something to tell an operator."""

    rule: str
    """The setting of island.alerts that asks for it."""
    run: str
    island: str
    """The island that sends the alert."""
    text: str
    time: float
    """Unix time."""


class Rules:
    """Applies the rules of a config to an account. `find` is called again and again."""

    def __init__(
        self, config: AlertsConfig, account: RunAccount, folder: Path, begin: float
    ) -> None:
        """`folder`: on the disk to watch. `begin`: unix time since which a first commit is
        awaited.
        """
        self._config = config
        self._account = account
        self._folder = folder
        self._begin = begin
        self._num_seen = len(account.incidents)
        self._present: dict[str, float] = {}
        """Unix time of the last commit with each island."""
        self._told: set[tuple[str, str]] = set()

    def find(self, now: float) -> list[tuple[str, str]]:
        """Return the rule and the text of each trouble that has begun since the last call."""
        lasting = list(self._find_lasting(now))
        new = [(rule, text) for rule, what, text in lasting if (rule, what) not in self._told]
        self._told = {(rule, what) for rule, what, _ in lasting}
        return [*self._find_incidents(), *new]

    def _find_incidents(self) -> list[tuple[str, str]]:
        incidents = self._account.incidents[self._num_seen :]
        self._num_seen += len(incidents)
        return [(rule, text_of(each)) for each in incidents if (rule := self._rule_of(each))]

    def _rule_of(self, incident: Incident) -> str:
        if incident.kind == DISAGREEMENT and self._config.disagreement:
            return "disagreement"
        if incident.kind == "loss spike" and self._config.loss_spike:
            return "loss_spike"
        return ""

    def _find_lasting(self, now: float) -> Iterator[tuple[str, str, str]]:
        config = self._config
        last = self._account.last_commit
        if last is not None:
            self._present |= dict.fromkeys(last[0], last[1].time)
        if config.no_commit_minutes is not None:
            silent = now - max(self._begin, last[1].time if last else 0.0)
            if silent > MINUTE * config.no_commit_minutes:
                yield (
                    "no_commit_minutes",
                    "",
                    f"no round has been committed for {human_duration(silent)}",
                )
        if config.island_away_minutes is not None and last is not None:
            for name, time in sorted(self._present.items()):
                if last[1].time - time > MINUTE * config.island_away_minutes:
                    away = human_duration(last[1].time - time)
                    yield (
                        "island_away_minutes",
                        name,
                        f"{name} has been in no committed round for {away}",
                    )
        if config.disk_share is not None:
            yield from self._find_full_disk(config.disk_share)

    def _find_full_disk(self, most: float) -> Iterator[tuple[str, str, str]]:
        usage = shutil.disk_usage(self._folder)
        share = 1 - usage.free / usage.total
        if share > most:
            text = (
                f"the disk of {self._folder} is {percent(share)} full: "
                f"{human_bytes(usage.free)} are free"
            )
            yield "disk_share", "", text


def text_of(incident: Incident) -> str:
    """Return an incident as the text of an alert."""
    who = incident.island or "the run"
    return f"{who}: {incident.kind}: {incident.cause}. Cure: {incident.cure}."
