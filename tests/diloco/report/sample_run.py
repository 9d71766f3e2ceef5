"""A run of three islands as its records tell it, for tests of summary and report."""

import math
from pathlib import Path

from diloco.records.metrics import EvalRecord, EventRecord, Metrics, RoundRecord, StepRecord
from diloco.records.run_folder import RunFacts, write_facts

NUM_PARAMS, INNER_STEPS, TOKENS = 1_000_000, 10, 512
STEP_SECONDS, WAIT_SECONDS, REDUCE_SECONDS = 0.5, 0.4, 0.8
ROUND_SECONDS = INNER_STEPS * STEP_SECONDS + WAIT_SECONDS + REDUCE_SECONDS
START = 1_700_000_000.0


class Island:
    """Writes an island's records with its own clock."""

    def __init__(self, run_dir: Path, name: str, first_round: int = 0) -> None:
        self.name = name
        self.metrics = Metrics(run_dir / name / "metrics.jsonl")
        self.now = START + first_round * ROUND_SECONDS
        self.step = first_round * INNER_STEPS
        self.tokens = 0

    def inner_steps(self, skipped: int | None = None) -> None:
        for _ in range(INNER_STEPS):
            self.step, self.now = self.step + 1, self.now + STEP_SECONDS
            is_skipped = self.step == skipped
            self.tokens += 0 if is_skipped else TOKENS
            loss = (
                None
                if is_skipped
                else 2 + 3.5 * math.exp(-self.step / 20) + 0.05 * math.sin(self.step * 7.0)
            )
            self.metrics.write(
                StepRecord(
                    step=self.step,
                    tokens=self.tokens,
                    loss=loss,
                    lr=3e-4,
                    grad_norm=math.inf if is_skipped else 0.8,
                    seconds=STEP_SECONDS,
                    tokens_per_second=TOKENS / STEP_SECONDS,
                    skipped=is_skipped,
                    time=self.now,
                )
            )

    def round(
        self,
        number: int,
        participants: tuple[str, ...],
        *,
        attempt: int = 0,
        cause: str | None = None,
    ) -> None:
        self.now += WAIT_SECONDS + REDUCE_SECONDS
        self.metrics.write(
            RoundRecord(
                round=number,
                attempt=attempt,
                participants=participants,
                committed=cause is None,
                digest=f"{number:08x}",
                bytes_sent=4_000_000,
                bytes_received=4_000_000,
                reduce_seconds=REDUCE_SECONDS,
                wait_seconds=WAIT_SECONDS,
                pseudo_gradient_norm=1.0,
                cause=cause,
                time=self.now,
            )
        )

    def evaluation(self, number: int, tokens: int, gain: float = 0.0) -> None:
        self.now += 0.2
        loss = 2 + 3.5 * math.exp(-number / 2) - gain
        self.metrics.write(
            EvalRecord(
                round=number,
                tokens=tokens,
                loss=loss,
                bits_per_byte=loss / math.log(2),
                time=self.now,
            )
        )

    def event(self, name: str, text: str = "") -> None:
        self.metrics.write(EventRecord(name=name, text=text, time=self.now))


def write_run(run_dir: Path, num_rounds: int = 8) -> Path:
    """Three islands: island-1 is lost in round 4, which is aborted once; island-2 joins for round
    3.
    """
    zero, one, two = (
        Island(run_dir, "island-0"),
        Island(run_dir, "island-1"),
        Island(run_dir, "island-2", 3),
    )
    two.event("joined", "at round 3")
    for number in range(num_rounds):
        alive = [zero, *([one] if number <= 4 else []), *([two] if number >= 3 else [])]
        for island in alive:
            island.inner_steps(skipped=37 if island is zero else None)
        if number == 4:
            lost = "island 'island-1' is lost: <connection> reset"
            for island in (zero, two):
                island.round(number, ("island-0", "island-1", "island-2"), cause=lost)
            alive = [zero, two]
        for island in alive:
            island.round(number, tuple(i.name for i in alive), attempt=int(number == 4))
            island.evaluation(number + 1, (number + 1) * INNER_STEPS * TOKENS * 2)
    zero.event("left", "the run is done")
    write_facts(run_dir, a_runs_facts(num_rounds))
    return run_dir


def a_runs_facts(num_rounds: int) -> RunFacts:
    return RunFacts(
        name="three islands",
        num_params=NUM_PARAMS,
        num_islands=3,
        total_steps=num_rounds * INNER_STEPS,
        bigram_loss=2.45,
        created="2026-01-02T03:04:05+00:00",
    )


def write_baseline(run_dir: Path, num_rounds: int = 8) -> None:
    """Write a baseline with a slightly lower loss than the islands."""
    baseline = Island(run_dir, "baseline")
    for number in range(num_rounds):
        baseline.inner_steps()
        baseline.evaluation(number + 1, (number + 1) * INNER_STEPS * TOKENS * 2, gain=0.03)
