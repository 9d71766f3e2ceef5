"""Optional sinks for an island's records: wandb and TensorBoard. Each is imported only when the
config enables it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from diloco.config.check import check_extras
from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.records.best_effort import best_effort
from diloco.records.metrics import (
    EvalRecord,
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    Sink,
    StepRecord,
    TrafficRecord,
)

NOT_SCALARS = frozenset({"time", "step", "round"})


def build_sinks(
    config: IslandConfig, folder: Path, *, run_name: str, settings: Mapping[str, object]
) -> list[Sink]:
    """Return the sinks that the config enables. `folder`: the island's.

    `settings`: the resolved config. Raises ConfigError if a package that the config names is not
    installed, or if wandb is online without an account. Any other failure costs that sink and a
    warning.
    """
    check_extras(config, config.label)
    sinks: list[Sink] = []
    with best_effort("nothing is sent to wandb"):
        if config.wandb != "off":
            sinks.append(WandbSink(config, folder, run_name=run_name, settings=settings))
    with best_effort("nothing is written for TensorBoard"):
        if config.tensorboard:
            sinks.append(TensorBoardSink(folder))
    return sinks


class WandbSink:
    """Logs to one wandb run per island. The islands of a run share a wandb group."""

    def __init__(
        self, config: IslandConfig, folder: Path, *, run_name: str, settings: Mapping[str, object]
    ) -> None:
        import wandb
        from wandb.errors import UsageError

        assert config.wandb != "off", "no wandb sink is built when wandb is off"
        folder.mkdir(parents=True, exist_ok=True)
        # The mode must be set for the process as well: otherwise offline runs still send wandb's
        # own telemetry.
        wandb.setup(wandb.Settings(mode=config.wandb))
        try:
            self._run = wandb.init(
                project="diloco",
                dir=str(folder),
                group=run_name,
                name=f"{run_name}/{config.label}",
                config=dict(settings),
                mode=config.wandb,
                settings=wandb.Settings(
                    console="off", silent=True, save_code=False, disable_git=True
                ),
            )
        except UsageError as error:
            cure = "set island.wandb=offline, which needs neither network nor account, or off"
            text = f"island.wandb: got {config.wandb!r}, and wandb cannot start: {error} Or {cure}"
            raise ConfigError(text) from None
        for kind, axis in (("step", "step"), ("round", "round"), ("eval", "round")):
            self._run.define_metric(f"{kind}/*", step_metric=axis)

    def write(self, record: Record) -> None:
        if not isinstance(record, EventRecord | PauseRecord | TrafficRecord):
            self._run.log({axis_of(record)[0]: axis_of(record)[1], **scalars(record)})

    def close(self) -> None:
        """Finish the wandb run and its service process; online, this waits for the upload."""
        import wandb

        self._run.finish()
        # Offline, finish() may return before the log is on disk. This waits for the end of the
        # service.
        wandb.teardown()


class TensorBoardSink:
    """Writes event files to tensorboard/ in the island's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"), flush_secs=10)

    def write(self, record: Record) -> None:
        if isinstance(record, EventRecord):
            self._writer.add_text("event", f"{record.name}: {record.text}", walltime=record.time)
            return
        if isinstance(record, PauseRecord | TrafficRecord):
            return
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, axis_of(record)[1], walltime=record.time)

    def close(self) -> None:
        self._writer.close()


def axis_of(record: StepRecord | RoundRecord | EvalRecord) -> tuple[str, int]:
    """Return the name and value of the record's x-axis: its step or its round."""
    return ("step", record.step) if isinstance(record, StepRecord) else ("round", record.round)


def scalars(record: Record) -> dict[str, float]:
    """Return the record's finite numbers by `kind/field`. Participants are given as their
    number.
    """
    numbers: dict[str, float] = {}
    for key, value in asdict(record).items():
        number = len(value) if key == "participants" else value
        if key not in NOT_SCALARS and isinstance(number, (int, float)) and math.isfinite(number):
            numbers[f"{record.kind}/{key}"] = float(number)
    return numbers
