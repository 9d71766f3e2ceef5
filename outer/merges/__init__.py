"""Merge rules, which combine the participants' parts into one."""

from functools import partial

from outer.config import MergeConfig
from outer.config.own_code import is_import_path
from outer.merges.base import Merge
from outer.merges.centered_clip import centered_clip
from outer.merges.contributors import contributors
from outer.merges.geometric_median import geometric_median
from outer.merges.mean import mean
from outer.merges.own_merge import build_own_merge
from outer.merges.radial import radial
from outer.merges.trimmed_mean import trimmed_mean


def build_merge(config: MergeConfig) -> Merge:
    """Return the merge rule that the config selects. Raises InputError for own code that does
    not do what a rule must.
    """
    if is_import_path(config.rule):
        return build_own_merge(config.rule, config.options)
    rules: dict[str, Merge] = {
        "mean": mean,
        "trimmed_mean": partial(trimmed_mean, trim=config.trim),
        "geometric_median": geometric_median,
        "centered_clip": centered_clip,
        "radial": radial,
        "contributors": contributors,
    }
    return rules[config.rule]
