"""Optional sinks for an island's records: wandb and TensorBoard. Both are imported only when asked for."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from diloco.config import ConfigError, IslandConfig
from diloco.metrics import EvalRecord, EventRecord, Record, RoundRecord, Sink, StepRecord

PROJECT = "diloco"
"""The wandb project."""
NOT_SCALARS = frozenset({"time", "step", "round"})


def build_sinks(config: IslandConfig, folder: Path, *, run_name: str, settings: Mapping[str, object]) -> list[Sink]:
    """The sinks the config asks for, in the island's `folder`; `settings` is the resolved config."""
    sinks: list[Sink] = []
    if config.wandb != "off":
        sinks.append(WandbSink(config, folder, run_name=run_name, settings=settings))
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder))
    return sinks


class WandbSink:
    """One wandb run an island; the islands of a run share a wandb group."""

    def __init__(self, config: IslandConfig, folder: Path, *, run_name: str, settings: Mapping[str, object]) -> None:
        import wandb

        assert config.wandb != "off", "no wandb sink is built when wandb is off"
        folder.mkdir(parents=True, exist_ok=True)
        # Of the process, not only of the run: else what wandb measures of itself is sent home from offline runs too.
        wandb.setup(wandb.Settings(mode=config.wandb))
        try:
            self._run = wandb.init(
                project=PROJECT,
                dir=str(folder),
                group=run_name,
                name=f"{run_name}/{config.island}",
                config=dict(settings),
                mode=config.wandb,
                settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
            )
        except wandb.Error as error:
            cure = "set island.wandb=offline, which needs neither network nor account, or off"
            raise ConfigError(
                f"island.wandb: got {config.wandb!r}, and wandb cannot begin: {error} Or {cure}"
            ) from None
        for kind, axis in (("step", "step"), ("round", "round"), ("eval", "round")):
            self._run.define_metric(f"{kind}/*", step_metric=axis)

    def write(self, record: Record) -> None:
        """Log the record's numbers against its step or round."""
        if not isinstance(record, EventRecord):
            self._run.log({axis_of(record)[0]: axis_of(record)[1], **scalars(record)})

    def close(self) -> None:
        """Finish the wandb run and its service process; online, this waits for the upload."""
        import wandb

        self._run.finish()
        # Offline, finish() may return before the log is on disk; the end of the service is waited for.
        wandb.teardown()


class TensorBoardSink:
    """Event files in the island's folder, under tensorboard/."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"), flush_secs=10)

    def write(self, record: Record) -> None:
        """Add the record's numbers at its step or round."""
        if isinstance(record, EventRecord):
            self._writer.add_text("event", f"{record.name}: {record.text}", walltime=record.time)
            return
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, axis_of(record)[1], walltime=record.time)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def axis_of(record: StepRecord | RoundRecord | EvalRecord) -> tuple[str, int]:
    """What the record is drawn against: its step, or its round."""
    return ("step", record.step) if isinstance(record, StepRecord) else ("round", record.round)


def scalars(record: Record) -> dict[str, float]:
    """The record's finite numbers as `kind/field`; participants as their count."""
    named: dict[str, float] = {}
    for key, value in asdict(record).items():
        number = len(value) if key == "participants" else value
        if key not in NOT_SCALARS and isinstance(number, (int, float)) and math.isfinite(number):
            named[f"{record.kind}/{key}"] = float(number)
    return named
