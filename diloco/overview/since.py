"""What happened in a run since a time that the reader chooses: one line, and a line for each kind
of incident.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from diloco.errors import ConfigError
from diloco.formatting import one_line
from diloco.overview.account import RunAccount, count_missed
from diloco.overview.incidents import ABORTED, DIED, DISAGREEMENT, JOINED, LEFT_OUT, Incident
from diloco.records.metrics import LOST

AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
LINES = 8
"""Most incidents that are listed as lines; the worst and newest."""
ENDS = (DIED, "failed", "hung")
JOINED_KINDS = (LOST, "refused")
"""Incidents that are told as one, whatever their islands and causes."""
NUMBERS = re.compile(r"\d+(?:\.\d+)?|\b[0-9a-f]{8,}\b")


def parse_since(text: str, now: float) -> float:
    """Return the unix time that the user means: `8h`, `30min`, `2d`, `22:30` (UTC, in the last day)
    or ISO 8601.

    Raises ConfigError.
    """
    if found := AGO.fullmatch(text.strip()):
        return now - float(found[1]) * UNITS[found[2]]
    if found := CLOCK.fullmatch(text.strip()):
        today = datetime.fromtimestamp(now, UTC).replace(
            hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0
        )
        return (today if today.timestamp() <= now else today - timedelta(days=1)).timestamp()
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"--since: got {text!r}; allowed: a time ago (30min, 8h, 2d), a time of day in UTC "
            "(22:30), or a date (2026-11-27T22:30)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def find_since(account: RunAccount, since: float) -> list[Incident]:
    """Return the incidents since a unix time, the worst first, of equally bad ones the newest
    first.

    Incidents of one island that differ in numbers only are told as one, with their count and the
    last cause. So are all losses, and all refusals.
    """
    alike: dict[tuple[str, str, str], Incident] = {}
    for incident in sorted(account.incidents, key=lambda each: each.time):
        if incident.time < since:
            continue
        cause = "" if incident.kind in JOINED_KINDS else NUMBERS.sub("#", incident.cause)
        key = ("" if incident.kind in JOINED_KINDS else incident.island, incident.kind, cause)
        known = alike.get(key, replace(incident, count=0))
        alike[key] = replace(incident, count=known.count + 1, others=known.others | {known.island})
    return sorted(alike.values(), key=lambda each: (-each.severity, -each.time))


def describe_since(account: RunAccount, since: float, at: float) -> str:
    """Return the second line about a run: what happened since a unix time, as of the unix time
    `at`.
    """
    begin = max(
        since,
        min((i.times.first for i in account.islands.values() if i.times.first), default=since),
    )
    return f"since {describe_time(begin, at)}: {'; '.join(summarise(account, since))}"


def summarise(account: RunAccount, since: float) -> Iterator[str]:
    """Yield the clauses of the second line."""
    found = [each for each in account.incidents if each.time >= since]
    ended = Counter(each.island for each in found if each.kind in ENDS)
    for name, count in sorted(ended.items()):
        yield f"{name} died {times(count)}{describe_absence(account, name, since)}"
    joined = [each.island for each in found if each.kind == JOINED]
    if joined:
        yield f"{', '.join(dict.fromkeys(joined))} joined"
    for kind, one, many in (
        (ABORTED, "1 attempt aborted", "{} attempts aborted"),
        (LEFT_OUT, "1 exclusion", "{} exclusions"),
        ("loss spike", "1 loss spike", "{} loss spikes"),
        ("not saved", "1 checkpoint not saved", "{} checkpoints not saved"),
    ):
        if count := sum(each.kind == kind for each in found):
            yield one if count == 1 else many.format(count)
    differing = [each for each in found if each.kind == DISAGREEMENT]
    yield f"{len(differing)} DISAGREEMENTS" if differing else "no disagreement"


def describe_absence(account: RunAccount, name: str, since: float) -> str:
    """Return how many rounds an island missed in its failures since a time, and whether it is still
    away.
    """
    if (island := account.islands.get(name)) is None:
        return ""
    away = [
        each
        for each in island.absences
        if each.is_failure and (each.end is None or each.end >= since)
    ]
    missed = sum(count_missed(account, name, each) for each in away)
    where = ", is away" if any(each.end is None for each in away) else ""
    return (f", missed {missed} round{'' if missed == 1 else 's'}" if missed else "") + where


def lines_since(account: RunAccount, since: float, at: float, most: int = LINES) -> list[str]:
    """Return a line for each incident: when, who, what, why, and the cure."""
    found = find_since(account, since)
    lines = [describe_incident(each, at) for each in found[:most]]
    return lines + (
        [f"and {len(found) - most} more: `diloco watch` lists them"] if len(found) > most else []
    )


def describe_incident(incident: Incident, at: float) -> str:
    """Return an incident as one line."""
    who = f"{incident.who} " if incident.who else ""
    count = f" {incident.count}x, last" if incident.count > 1 else ""
    cause = f": {one_line(incident.cause)}" if incident.cause else ""
    return (
        f"{describe_time(incident.time, at)} {who}{incident.kind}{count}{cause}. Cure: "
        f"{incident.cure}."
    )


def describe_time(moment: float, at: float) -> str:
    """Return a unix time as a time of day in UTC, with its date if it is not within the day before
    `at`.
    """
    form = "%H:%MZ" if abs(at - moment) < 86400 else "%Y-%m-%d %H:%MZ"
    return time.strftime(form, time.gmtime(moment))


def times(count: int) -> str:
    """Return how often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
