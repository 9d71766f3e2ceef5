"""torchtitan's trainer as one island of a run. It is a subclass of the trainer of the config, whichever that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan.models.common.moe import MoE  # pyright: ignore[reportMissingImports]
from torchtitan.tools import filesystem  # pyright: ignore[reportMissingImports]
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.run_config import OwnLoopConfig, read_config
from diloco.titan.components import Checkpointing, Recording, Splitting, Validating, derive

Config = Trainer.Config
ROUTER_BIASES = "*.expert_bias_E"
"""Biases by which routers balance their experts. They are state of the model, although no gradient trains them."""


def with_islands(config: Config) -> Config:
    """Return the config of a trainer that is one island of a run, with its options `--islands` and
    `--island`.

    `config` may be of a trainer of your own, if that is a subclass of torchtitan's.
    """
    if not isinstance(config, Trainer.Config):
        raise ConfigError(f"with_islands: got a {type(config).__name__}; it takes a config of torchtitan's Trainer")

    @dataclass(kw_only=True, slots=True)
    class Config(type(config)):
        islands: str = ""
        """YAML file of the run, the same on every island."""

        island: list[str] = field(default_factory=list)
        """Values that differ between islands: island.index=1,island.bootstrap=[ADDRESS]"""

        island_text: Literal["split", "own"] = "split"
        """split: all islands have the same dataset, and each reads its part. own: each island has a dataset of its
        own, and reads all of it."""

        island_buffers: list[str] = field(default_factory=list)
        """Buffers that islands share: NAME=mean or NAME=donor. Biases of routers are always shared."""

    trainer = type(config)._owner  # pyright: ignore[reportAttributeAccessIssue]
    type(f"Islands{trainer.__name__}", (IslandsTrainer, trainer), {"Config": Config})
    return Config(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


class IslandsTrainer:
    """What an island adds to a trainer. All ranks of the trainer are one island."""

    islands: Islands | None = None
    """The run, entered when the checkpoint is loaded."""

    def __init__(self, config: Any) -> None:
        """Build the trainer. Raises ConfigError before anything starts if the run cannot be made."""
        self._overrides = join_lists(config.island)
        if not config.islands:
            raise ConfigError("--islands is missing: give the YAML file of the run (docs/library.md)")
        read = read_config(config.islands, self._overrides)
        check_trainer(config, read)
        self._buffers = read_buffers(config)
        self._tokens_before = 0
        super().__init__(with_components(config, read, self))

    def enter(self, state: Path | None) -> None:
        """Enter the run, with the state of the outer loop in the folder `state`, or a new one.

        The trainer's step and learning rate become the run's. The checkpointer calls it after it
        has loaded.
        """
        self.islands = Islands(
            self.config.islands,
            self.model_parts,
            self.optimizers,
            self._overrides,
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
        """Return the tokens of the step that this rank counts: 0 if another rank computes on the same ones."""
        tokens = self.ntokens_seen - self._tokens_before
        self._tokens_before = self.ntokens_seen
        meshes = [self.parallel_dims.get_optional_mesh(axis) for axis in ("tp", "pp")]
        is_first = all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)
        return tokens if is_first else 0

    def _take_loss(self) -> float | None:
        """Return the loss if the trainer has logged it and this rank knows it: only the last stage does."""
        loss = self.metrics_processor.take_loss()
        return loss if not self.parallel_dims.pp_enabled or self.pp_has_last_stage else None

    def _follow(self) -> None:
        """Set the trainer's step and learning rate to those of the run, and let it end with the run."""
        if self.step != self.islands.steps:
            self.step = self.islands.steps
            set_schedule(self.lr_schedulers, self.step)
        if self.islands.is_over:
            # The trainer makes its last checkpoint at this step.
            self.config.training.steps = self.step


def with_components(config: Any, read: OwnLoopConfig, trainer: IslandsTrainer) -> Any:
    """Return the trainer's config with components that know of the run, and an own folder for the island."""
    loader = config.dataloader
    if config.island_text == "split":
        place = {"island": read.island.index, "num_islands": read.run.outer.start_islands}
        loader = derive(loader, Splitting, **place)
    return replace(
        config,
        dataloader=loader,
        dump_folder=filesystem.join(config.dump_folder, f"island-{read.island.index}"),
        checkpoint=derive(config.checkpoint, Checkpointing, trainer=trainer),
        validator=derive(config.validator, Validating, trainer=trainer),
        metrics=derive(config.metrics, Recording),
    )


def check_trainer(config: Any, read: OwnLoopConfig) -> None:
    """Raise ConfigError if the trainer cannot make the run."""
    outer = read.run.outer
    steps = outer.rounds * outer.inner_steps
    if config.training.steps < steps:
        raise ConfigError(
            f"training.steps is {config.training.steps}, and the run has {steps} steps (outer.rounds {outer.rounds} x "
            f"outer.inner_steps {outer.inner_steps}); set --training.steps {steps}"
        )
    folder = filesystem.join(config.dump_folder, config.checkpoint.folder)
    if config.checkpoint.enable and filesystem.is_remote(folder):
        raise ConfigError(
            f"the checkpoints' folder {folder} is remote, and the state of the outer loop can only be written to a "
            "local or mounted folder; set --dump_folder or --checkpoint.folder"
        )
    if read.has_data:
        raise ConfigError(
            f"{config.islands} has `data`, which torchtitan's loaders do not read; take it out, and set --dataloader"
        )


def read_buffers(config: Any) -> Mapping[str, str]:
    """Return the buffers that islands share, as `Islands` takes them. Raises ConfigError."""
    named: dict[str, str] = {}
    for text in config.island_buffers:
        name, sign, kind = text.partition("=")
        if not sign:
            raise ConfigError(f"--island_buffers: got {text!r}; give NAME=mean or NAME=donor")
        named[name] = kind
    layers = config.model_spec.model.traverse(MoE.Config)
    if any(layer.load_balance_coeff is not None for _, layer, *_ in layers):
        named.setdefault(ROUTER_BIASES, "mean")
    return named


def join_lists(words: Sequence[str]) -> list[str]:
    """Join values that contain commas, at which torchtitan has cut its command line.

    >>> join_lists(["island.index=1", "island.bootstrap=[a", "b]"])
    ['island.index=1', 'island.bootstrap=[a,b]']
    """
    joined: list[str] = []
    is_open = False
    for word in words:
        if is_open:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
        text = joined[-1]
        is_open = text.count("[") + text.count("{") > text.count("]") + text.count("}")
    return joined


def set_schedule(schedulers: Any, step: int) -> None:
    """Set torchtitan's schedules, and the learning rates of their optimizers, to those before step `step`, from 0."""
    schedulers.load_state_dict({"last_epoch": step})
    for scheduler in schedulers:
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
