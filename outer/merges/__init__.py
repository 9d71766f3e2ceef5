"""Merge rules, which reduce the participants' parts to one."""

from functools import partial

from outer.config import MergeConfig
from outer.merges.base import Merge
from outer.merges.centered_clip import centered_clip
from outer.merges.contributors import contributors
from outer.merges.geometric_median import geometric_median
from outer.merges.mean import mean
from outer.merges.radial import radial
from outer.merges.trimmed_mean import trimmed_mean


def build_merge(config: MergeConfig) -> Merge:
    """The merge rule that the config selects."""
    rules: dict[str, Merge] = {
        "mean": mean,
        "trimmed_mean": partial(trimmed_mean, trim=config.trim),
        "geometric_median": geometric_median,
        "centered_clip": centered_clip,
        "radial": radial,
        "contributors": contributors,
    }
    return rules[config.rule]
