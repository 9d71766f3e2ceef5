"""The records of an island so far, as rows of numbers from which a page can draw any moment of the
run.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.formatting import one_line
from diloco.overview.account import IslandAccount
from diloco.records.figures import ENDS, LatestRecords, finite
from diloco.records.growing_file import GrowingFile
from diloco.records.metrics import (
    EvalRecord,
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    StepRecord,
    TrafficRecord,
)
from diloco.records.run_folder import METRICS, PRESENCE, Tail

Row = list[Any]
Rows = dict[str, list[Row]]
KINDS = (
    "steps",
    "work",
    "rounds",
    "evals",
    "events",
    "sources",
    "presence",
    "ranks",
    "pace",
    "experts",
    "pauses",
    "traffic",
)
MAX_POINTS = 2000
"""Most rows of a kind that a page first gets per island. With many islands it gets fewer."""
MAX_ROWS = 16_000
"""Most rows of a kind that a page first gets of all islands together."""
RANK_FIELDS = (6, 7)
TAIL_ROWS = 200
"""Number of the newest rounds and inner steps that a page always gets."""
MAX_TEXT = 400
MAX_TIME = 1e11
"""Largest unix time in seconds. A record with a later time is damaged."""


class Groups:
    """The sets of islands that took part in rounds. Each set is kept once, because many rounds
    share few sets.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def number_of(self, names: tuple[str, ...]) -> int:
        """Return the index of the set in `names`. A new set is appended."""
        if names not in self._numbers:
            self._numbers[names] = len(self.names)
            self.names.append(names)
        return self._numbers[names]


@dataclass
class IslandHistory:
    """The rows of one island by kind, each in the order of the records. Times are unix seconds.

    steps    time, inner step, tokens so far, loss, tokens per second, gradient noise scale (None if
             not recorded)
    work     begin, end: an inner step, or several without a pause between them
    rounds   end, round, attempt, committed (0 or 1), seconds of wait, seconds of reduce, bytes sent
             so far, committed so far, aborted so far, number of the group of its participants,
             digest, cause, planner, norm of the pseudo-gradient, norm of the mean, their cosine,
             signers, audited parts, parts left out by island, committed rounds of the run
    evals    time, tokens of all islands, held-out loss
    events   time, name, text, whether the island's processes ended with it (0 or 1)
    sources  time, tokens so far by source of the text
    experts  time, and for each layer with experts, by its number: the load of its fullest expert
    ranks    time, round, and for each rank what RoundRecord.ranks has
    pace     time, seconds per round, share of them in inner steps, bytes sent per round, bits per
             second in the reduce: of the last committed rounds
    pauses   begin, end, what the island did instead of training: evaluating or saving
    traffic  time, inner step, bytes that rank 0 sent inside the island in this step by axis, and
             the planned ones
    presence time, whether the island answers a watcher over the network (0 or 1), why it does not
    """

    folder: Path
    groups: Groups
    account: IslandAccount
    rows: Rows = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / METRICS)
        self._presence = LinesTail(self.folder / PRESENCE)

    def read(self) -> None:
        """Read the records that were completed since the last call."""
        try:
            records = self._tail.new_records()
        except OSError:  # The file cannot be read at present; the next call tries again.
            records = []
        for record in records:
            if 0 <= record.time < MAX_TIME:
                self._add(record, self.account.write(record))
        self.rows["presence"] += [
            row for line in self._presence.new_lines() if (row := parse_presence(line))
        ]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of rows of each kind."""
        return {kind: len(rows) for kind, rows in self.rows.items()}

    @property
    def latest(self) -> LatestRecords:
        """The figures after the records read so far."""
        return self.account.latest

    def _add(self, record: Record, pace: list[float | None] | None) -> None:
        match record:
            case StepRecord():
                self._add_step(record)
            case RoundRecord():
                self._add_round(record, pace)
            case EvalRecord():
                self.rows["evals"].append([record.time, record.tokens, finite(record.loss)])
                self.rows["pauses"].append(
                    [record.time - (finite(record.seconds) or 0.0), record.time, "evaluating"]
                )
            case EventRecord():
                text = one_line(record.text)[:MAX_TEXT]
                self.rows["events"].append(
                    [record.time, record.name[:64], text, int(record.name in ENDS)]
                )
            case TrafficRecord():
                self.rows["traffic"].append([record.time, record.step, record.sent, record.planned])
            case PauseRecord():
                self.rows["pauses"].append(
                    [record.time - (finite(record.seconds) or 0.0), record.time, record.name]
                )

    def _add_step(self, record: StepRecord) -> None:
        tokens = self.latest.figures.tokens
        row = [
            record.time,
            record.step,
            tokens,
            finite(record.loss),
            finite(record.tokens_per_second),
        ]
        self.rows["steps"].append([*row, finite(record.noise_scale.get("tokens"))])
        self.rows["work"].append([record.time - (finite(record.seconds) or 0.0), record.time])
        if record.source_tokens:
            self.rows["sources"].append([record.time, dict(self.latest.source_tokens)])
        if record.expert_loads:
            self.rows["experts"].append(
                [record.time, {k: finite(load) for k, load in record.expert_loads.items()}]
            )

    def _add_round(self, record: RoundRecord, pace: list[float | None] | None) -> None:
        figures = self.latest.figures
        counts = [figures.bytes_sent, figures.committed, figures.aborted]
        seconds = [finite(record.wait_seconds) or 0.0, finite(record.reduce_seconds) or 0.0]
        told = [
            self.groups.number_of(record.participants),
            record.digest[:16],
            one_line(record.cause or "")[:MAX_TEXT],
            record.planner,
        ]
        which = [record.time, record.round, record.attempt, int(record.committed)]
        norms = [
            finite(each)
            for each in (record.pseudo_gradient_norm, record.mean_norm, record.mean_cosine)
        ]
        checked = [record.signers, record.audited, record.gated]
        self.rows["rounds"].append(
            [*which, *seconds, *counts, *told, *norms, *checked, figures.round]
        )
        if pace is not None:
            self.rows["pace"].append(pace)
        if ranks := [
            row for row in record.ranks if len(row) in RANK_FIELDS and all(map(math.isfinite, row))
        ]:
            self.rows["ranks"].append([record.time, record.round, ranks])

    def thinned(self, counts: dict[str, int], most: int) -> Rows:
        """Return about `most` of the first `counts` rows of each kind, and all of the newest rows.

        On all islands with equally many rounds, the same rounds are kept.
        """
        first = {kind: rows[: counts[kind]] for kind, rows in self.rows.items()}
        thinned = {kind: thin(rows, most) for kind, rows in first.items()}
        return thinned | {
            "work": join_work(first["work"], most),
            "rounds": thin_rounds(first["rounds"], most),
        }


class LinesTail:
    """Reads the complete lines of a text file that may still grow or may not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GrowingFile(path)

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        try:
            return [line.decode(errors="replace") for line in self._file.new_lines()]
        except OSError:
            return []


def parse_presence(line: str) -> Row | None:
    """Return a line of presence.jsonl as a row; None if it is invalid."""
    try:
        values = json.loads(line)
        time = float(values["time"])
        text = one_line(str(values["text"]))[:MAX_TEXT]
        return [time, int(bool(values["answers"])), text] if 0 <= time < MAX_TIME else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def thin(rows: Sequence[Row], most: int) -> list[Row]:
    """Return about `most` rows at equal distances, always with the last row."""
    stride = max(1, math.ceil(len(rows) / most))
    return list(rows[::-1][::stride][::-1])


def thin_rounds(rows: Sequence[Row], most: int) -> list[Row]:
    """Return the rounds whose number is a multiple of a power of two, aborted attempts, and the
    last TAIL_ROWS rows.
    """
    stride = 1
    while len(rows) / stride > most:
        stride *= 2
    aborted = thin([row for row in rows if not row[3]], most // 2)
    kept = (
        [row for row in rows if row[3] and row[1] % stride == 0] + aborted + list(rows[-TAIL_ROWS:])
    )
    return sorted({(row[0], row[1], row[2]): row for row in kept}.values(), key=lambda row: row[0])


def join_work(rows: Sequence[Row], most: int) -> list[Row]:
    """Join inner steps without a pause between them. Among older steps, also join those with a
    pause too short to draw.
    """
    if not rows:
        return []
    older = rows[:-TAIL_ROWS]
    newest = rows[-TAIL_ROWS:]
    smallest = (rows[-1][1] - rows[0][0]) / most
    return join_close(older, smallest) + join_close(newest, 0.0)


def join_close(rows: Sequence[Row], smallest: float) -> list[Row]:
    """Join inner steps with a pause between them of at most `smallest` seconds, or of at most half
    a step.
    """
    joined: list[Row] = []
    for begin, end in rows:
        if joined and begin - joined[-1][1] <= max(smallest, (end - begin) / 2):
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined
