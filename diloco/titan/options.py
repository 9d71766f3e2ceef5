"""Options of torchtitan's trainer for a run, and which of them cannot make one."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.models.common.moe import MoE  # pyright: ignore[reportMissingImports]
from torchtitan.tools import filesystem  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.own_loop.run_config import OwnLoopConfig, read_config

log = logging.getLogger(__name__)
ROUTER_BIASES = "*.expert_bias_E"
"""Biases by which routers balance their experts: state, although no gradient trains them."""


def read_run(config: Any) -> OwnLoopConfig:
    """Return the run of a trainer's config. Raises ConfigError if the trainer cannot make it."""
    if not config.islands:
        raise ConfigError("--islands is missing: give the YAML file of the run (docs/library.md)")
    read = read_config(config.islands, join_lists(config.island))
    outer = read.run.outer
    steps = outer.rounds * outer.inner_steps
    if config.training.steps < steps:
        raise ConfigError(
            f"training.steps is {config.training.steps}, and the run has {steps} steps "
            "(outer.rounds "
            f"{outer.rounds} x outer.inner_steps {outer.inner_steps}); set --training.steps {steps}"
        )
    folder = filesystem.join(config.dump_folder, config.checkpoint.folder)
    if config.checkpoint.enable and filesystem.is_remote(folder):
        raise ConfigError(
            f"the checkpoints' folder {folder} is remote, and the state of the outer loop can only "
            "be written to a local or mounted folder; set --dump_folder or --checkpoint.folder"
        )
    if config.island_parts < 0:
        raise ConfigError(f"--island_parts: got {config.island_parts}; allowed: 0 and more")
    if read.has_data:
        raise ConfigError(
            f"{config.islands} has `data`, which torchtitan's loaders do not read; take it out, "
            "and set torchtitan's options --dataloader"
        )
    return read


def find_part(config: Any, read: OwnLoopConfig) -> tuple[int, int]:
    """Return the part of the text that this island reads, and the number of parts."""
    index = read.island.index
    num_parts = config.island_parts or read.run.outer.start_islands
    if index >= num_parts and config.island_parts != 1:
        log.warning(
            "island %d reads the same part of the text as island %d, because there are %d parts; "
            "set --island_parts to the number of islands, on all of them",
            *(index, index % num_parts, num_parts),
        )
    return index % num_parts, num_parts


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
