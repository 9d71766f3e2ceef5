"""torchtitan's trainer as one island of a run: a subclass of the trainer that the config builds."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torchtitan.tools import filesystem  # pyright: ignore[reportMissingImports]
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.run_config import OwnLoopConfig
from diloco.titan.components import Checkpointing, Recording, Splitting, Validating, derive
from diloco.titan.options import find_part, join_lists, read_buffers, read_run


def with_islands(config: Trainer.Config) -> Trainer.Config:
    """Return the config of a trainer that is one island of a run, with options for the run.

    `config` may be of a trainer of your own, if that is a subclass of torchtitan's.
    """
    if not isinstance(config, Trainer.Config):
        got = type(config).__name__
        raise ConfigError(f"with_islands: got a {got}; it takes a config of torchtitan's Trainer")

    @dataclass(kw_only=True, slots=True)
    class Config(type(config)):
        islands: str = ""
        """YAML file of the run, the same on every island."""

        island: list[str] = field(default_factory=list)
        """Values that differ between islands: island.index=1,island.bootstrap=[ADDRESS]"""

        island_parts: int = 0
        """Parts into which the islands' common dataset is cut: island k reads part k, modulo their
        number. 0: outer.start_islands. 1: each island has a dataset of its own and reads all of it.
        """

        island_buffers: list[str] = field(default_factory=list)
        """Buffers that islands share: NAME=mean or NAME=donor. Biases of routers always are."""

    trainer = type(config)._owner  # pyright: ignore[reportAttributeAccessIssue]
    # torchtitan makes the class that has a Config as an attribute what this Config builds.
    type(f"Islands{trainer.__name__}", (IslandsTrainer, trainer), {"Config": Config})
    return Config(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


class IslandsTrainer(Trainer):
    """What an island adds to a trainer. All ranks of the trainer are one island."""

    islands: Any = None
    """The run, which the checkpointer enters when it has loaded."""
    _tokens_before = 0
    """The trainer's tokens before this step."""

    def __init__(self, config: Any) -> None:
        """Build the trainer. Raises ConfigError first if the trainer cannot make the run."""
        read = read_run(config)
        self._buffers = read_buffers(config)
        super().__init__(with_components(config, read, self))

    def enter(self, state: Path | None) -> None:
        """Enter the run, with the saved state of the outer loop in a folder, or without.

        The trainer's step and learning rate become the run's.
        """
        self.islands = Islands(
            self.config.islands,
            self.model_parts,
            self.optimizers,
            join_lists(self.config.island),
            state=state,
            buffers=self._buffers,
        )
        self._tokens_before = self.ntokens_seen
        self._follow()

    def train_step(self, data_iterator: Any) -> None:
        """Make a step, count it, and launch and land rounds."""
        super().train_step(data_iterator)
        report = self.islands.step(self._count_tokens(), self._take_loss())
        if report is not None:
            self.metrics_processor.add(report)
        self._follow()

    def close(self) -> None:
        """Leave the run, before the trainer's process group is destroyed."""
        if self.islands is not None:
            self.islands.close("the trainer has ended")
        super().close()

    def _count_tokens(self) -> int:
        """Return the tokens of the step, 0 if another rank that computes on them counts them."""
        tokens = self.ntokens_seen - self._tokens_before
        self._tokens_before = self.ntokens_seen
        meshes = [self.parallel_dims.get_optional_mesh(axis) for axis in ("tp", "pp")]
        counts = all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)
        return tokens if counts else 0

    def _take_loss(self) -> float | None:
        """Return the step's loss if the trainer has logged it. Only the last stage knows it."""
        loss = self.metrics_processor.take_loss()
        return loss if not self.parallel_dims.pp_enabled or self.pp_has_last_stage else None

    def _follow(self) -> None:
        """Set step and learning rate to those of the run, and let the trainer end with the run."""
        if self.step != self.islands.steps:
            self.step = self.islands.steps
            set_schedule(self.lr_schedulers, self.step)
        if self.islands.is_over:
            # The trainer makes its last checkpoint at this step.
            self.config.training.steps = self.step


def with_components(config: Any, read: OwnLoopConfig, trainer: IslandsTrainer) -> Any:
    """Return the config with components that know of the run, and a folder of the island's own."""
    part, num_parts = find_part(config, read)
    return replace(
        config,
        dataloader=derive(config.dataloader, Splitting, part=part, num_parts=num_parts),
        dump_folder=filesystem.join(config.dump_folder, f"island-{read.island.index}"),
        checkpoint=derive(config.checkpoint, Checkpointing, trainer=trainer),
        validator=derive(config.validator, Validating, trainer=trainer),
        metrics=derive(config.metrics, Recording),
    )


def set_schedule(schedulers: Any, step: int) -> None:
    """Set torchtitan's schedules and their optimizers' learning rates to step `step`, from 0."""
    schedulers.load_state_dict({"last_epoch": step})
    for scheduler in schedulers:
        groups = scheduler.optimizer.param_groups
        for group, lr in zip(groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
