"""What every trainer of another project has to check before it enters a run, and the metrics of a
round.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.own_loop.run_config import read_config
from outer.report import RoundReport


def check_length(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    num_steps: int | None,
    setting: str,
) -> None:
    """Raise ConfigError if the trainer would end before the run.

    `num_steps`: the trainer's own limit in steps, None if it has none. `setting`: the name of that
    limit. A run that waits for a quorum has no fixed number of steps, so nothing is checked there.
    """
    run = read_config(config, overrides).run
    if num_steps is None or run.outer.wait_for != "all" or num_steps >= run.total_steps:
        return
    raise ConfigError(
        f"{setting} is {num_steps}, and the run has {run.total_steps} steps "
        f"(outer.rounds={run.outer.rounds} x outer.inner_steps={run.outer.inner_steps}): the "
        f"island would leave before the run is over. Set {setting} to at least {run.total_steps}, "
        "or lower outer.rounds on all islands; the run's end stops the trainer"
    )


def check_resumes(*, has_state: bool, step: int, cure: str) -> None:
    """Raise ConfigError if a trainer goes on at a step above 0 without the state of its islands.

    Otherwise an island alone would begin a new run with the old model, and its outer momentum would
    be gone.
    """
    if step > 0 and not has_state:
        raise ConfigError(
            f"the trainer resumes at its step {step} without the state of Islands, so it would "
            "begin a new run: the "
            f"checkpoint was saved without IslandsCallback, or after an error. {cure}"
        )


def round_metrics(report: RoundReport) -> dict[str, float]:
    """Return what a trainer logs about a round that has landed, by name. Bytes are those of all
    ranks.
    """
    return {
        "islands/round": float(report.round),
        "islands/participants": float(len(report.participants)),
        "islands/bytes_sent": float(report.bytes_sent),
        "islands/bytes_received": float(report.bytes_received),
        "islands/wait_seconds": report.wait_seconds,
    }
