"""Where an island saves is opened by all its ranks, or by none."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from diloco.checkpoints.facts import IslandFacts, parse_island_facts
from diloco.checkpoints.island_checkpoint import find_changes, open_checkpoints
from diloco.config.schema import IslandConfig, RunConfig
from diloco.runtime.progress import NO_PROGRESS, ResumePoint
from inner.checkpoint.folder import SavedCheckpoint
from inner.checkpoint.manifest import Manifest
from inner.data.mixture import READING_ORDER
from inner.errors import InputError
from tests.harness import run_ranks

URL = "nothing://here"
NOTHING = cast(Any, None)
"""No trainer and no outer loop: nothing is saved."""


def opened_on_a_rank(rank: int, folder: Path) -> str:
    island = IslandConfig.model_validate({"ranks": 2, "checkpoint": {"mirror": URL}})
    with (
        pytest.raises(InputError) as error,
        open_checkpoints(RunConfig(), island, folder, NOTHING, NOTHING),
    ):
        raise AssertionError("there is no such mirror")
    return str(error.value)


def test_a_checkpoint_of_another_reading_order_is_told() -> None:
    run = RunConfig()
    ours = IslandFacts(
        {}, ResumePoint(0, NO_PROGRESS), 0, run.model_dump(mode="json"), reading_order=READING_ORDER
    )
    assert find_changes(run, ours) == []
    (change,) = find_changes(run, replace(ours, reading_order=1))
    assert "reading order" in change


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_are_refused(loss: float) -> None:
    """Whoever writes them would blind the island to spikes; JSON that we write has none."""
    facts = IslandFacts({}, ResumePoint(0, NO_PROGRESS), 0, {}, losses=[2.5, loss])
    with pytest.raises(InputError, match=r"losses\.1: Input should be a finite number"):
        parse_island_facts(SavedCheckpoint(Path("step-00000003"), Manifest(3, asdict(facts), {})))


def test_a_mirror_that_cannot_be_used_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for error in run_ranks(opened_on_a_rank, 2, tmp_path, timeout_seconds=30):
        assert f"island.checkpoint.mirror: got '{URL}/run/island-0'" in error
