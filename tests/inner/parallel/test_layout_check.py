"""A model that does not fit its mesh is refused before anything is built, with field, value and
cure.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from inner.config import ParallelConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.parallel.layout_check import check_layout, check_torch
from inner.parallel.pipeline.stages import SPLIT_BACKWARD

SIZES = ModelSizes(dim=96, num_layers=6, num_heads=12, num_kv_heads=6, ffn_dim=256, vocab_size=260)


def check(
    degrees: Degrees,
    seq_len: int = 64,
    num_micro_batches: int = 8,
    sizes: dict[str, int] | None = None,
    **how: Any,
) -> None:
    check_layout(
        replace(SIZES, **(sizes or {})), degrees, ParallelConfig(**how), seq_len, num_micro_batches
    )


@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        (Degrees(), {}),
        (Degrees(pp=2, dp_shard=2, cp=2, tp=2), {}),
        (Degrees(tp=4), {"sizes": {"num_kv_heads": 2}}),
        (
            Degrees(tp=12),
            {"sizes": {"num_kv_heads": 1, "ffn_dim": 240}, "sequence_parallel": False},
        ),
        (Degrees(pp=6), {}),
        (Degrees(pp=2), {"layers_per_stage": (4, 2)}),
        (Degrees(cp=3), {"seq_len": 66, "context": "ulysses"}),
        (Degrees(dp_shard=1024), {}),
    ],
)
def test_a_layout_that_fits_is_accepted(degrees: Degrees, how: dict[str, Any]) -> None:
    check(degrees, **how)


@pytest.mark.parametrize(
    ("degrees", "how", "texts"),
    [
        (
            Degrees(tp=5),
            {},
            ["island.mesh.tp (5)", "model.num_heads (12)", "1 or 2 or 3 or 4", "num_heads to 15"],
        ),
        (
            Degrees(tp=3),
            {},
            ["island.mesh.tp (3)", "model.ffn_dim (256)", "1 or 2", "ffn_dim to 258"],
        ),
        (Degrees(tp=4), {}, ["island.mesh.tp (4)", "model.num_kv_heads (6)", "1 or 2 or 3"]),
        (
            Degrees(tp=2),
            {"seq_len": 63},
            ["island.mesh.tp (2)", "data.seq_len 63", "multiple of 2", "false"],
        ),
        (
            Degrees(tp=2),
            {"sizes": {"vocab_size": 1}},
            ["island.mesh.tp (2)", "model.vocab_size (1)"],
        ),
        (
            Degrees(cp=2),
            {"seq_len": 66},
            ["data.seq_len (66)", "cp", "multiple of 2 x cp = 4", "64 or 68"],
        ),
        (Degrees(cp=4), {"context": "ulysses"}, ["cp (4)", "num_kv_heads", "ring or all_gather"]),
        (
            Degrees(pp=8),
            {},
            ["model.num_layers (6)", "island.mesh.pp (8)", "6 or less", "8 or more"],
        ),
        (
            Degrees(pp=2),
            {"schedule": "zbv", "stages_per_rank": 3},
            ["stages_per_rank", "zbv needs 2", "got 3"],
        ),
        (
            Degrees(pp=2),
            {"layers_per_stage": (4, 3)},
            ["layers_per_stage", "adds up to 7", "6 layers"],
        ),
        (
            Degrees(pp=2),
            {"schedule": "zbv", "compile": True},
            ["parallel.compile", "zbv", "compile to false", "1f1b"],
        ),
        (
            Degrees(dp_shard=2),
            {"zero": 0},
            ["parallel.zero: 0", "dp_shard (2)", "dp_replicate to 2"],
        ),
        (
            Degrees(pp=2),
            {"schedule": "zbv", "zero": 3},
            ["parallel.zero: 3", "zbv", "zero to 2", "1f1b"],
        ),
        (
            Degrees(tp=2),
            {"recompute": "full", "compile": True},
            ["parallel.compile", "tp 2", "selective or none"],
        ),
        (
            Degrees(cp=2),
            {"recompute": "selective", "compile": True},
            ["parallel.compile", "cp 2", "recompute to none"],
        ),
        (
            Degrees(pp=4),
            {"num_micro_batches": 2},
            ["schedule: 1f1b", "at least 4", "got 2", "tokens_per_step"],
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_named_with_a_cure(
    degrees: Degrees, how: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        check(degrees, **how)
    assert [text for text in texts if text not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("installed", ["2.11.0+cu130", "2.12.1", "1.14.0"])
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_an_old_torch_is_refused_for_schedules_that_split_the_backward(
    schedule: Any, installed: str
) -> None:
    text = f"{schedule} .* torch 2.13 or later, but this is {re.escape(installed)}; .*1f1b"
    with pytest.raises(InputError, match=text):
        check_torch(ParallelConfig(schedule=schedule), Degrees(pp=2), installed)


@pytest.mark.parametrize(
    ("schedule", "pp", "installed"),
    [
        ("zbv", 2, "2.13.0+cpu"),
        ("zbv", 2, "2.13.0a0+git1"),
        ("zbv", 2, "3.0"),
        ("zbv", 1, "2.11.0"),
        ("1f1b", 2, "2.11.0"),
    ],
)
def test_other_schedules_and_newer_torch_are_not_refused(
    schedule: Any, pp: int, installed: str
) -> None:
    check_torch(ParallelConfig(schedule=schedule), Degrees(pp=pp), installed)
