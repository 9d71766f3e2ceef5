"""Buffers of a model of one's own: what is averaged, what a joiner takes, what is refused, what is
told.
"""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.own_loop.model.buffers import OwnBuffers
from outer.space.ranks import RankGroup
from tests.diloco.own_loop.loops import TOKENS, folder_of, one_step, own_config
from tests.faults.waits import until
from tests.swarm import read_records, swarm

STATISTICS = {"*.running_*": "mean", "1.num_batches_tracked": "donor"}


def normalised(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train_normalised(config: Config, index: int) -> Any:
    model = normalised(seed=index)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    joins = {"joins": True} if index == 2 else {}
    own = own_config(config, index, joins, start_islands=2, rounds=6, codec="int8")
    if index < 2:
        model.load_state_dict(normalised().state_dict())
    islands = diloco.Islands(own, model, optimizer, buffers=STATISTICS)
    entered = {name: values.clone() for name, values in model.named_buffers()}
    joiner = folder_of(config, 2) / "metrics.jsonl"
    for unit in islands.units():
        if islands.round == 3 and index < 2:
            until(
                lambda: any(each.get("name") == "joined" for each in read_records(joiner)),
                "the joiner has entered",
            )
        islands.step(tokens=TOKENS, loss=one_step(model, optimizer, unit))
    return entered, model.state_dict(), islands.digest


def test_running_statistics_are_averaged_and_a_joiner_takes_all_that_is_named(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{}, {}, {}]) as made:
        started = [made.start(index, train_normalised) for index in range(2)]
        records = tmp_path / "own" / "island-0" / "metrics.jsonl"
        until(
            lambda: any(each["kind"] == "round" for each in read_records(records)),
            "a round is committed",
        )
        started.append(made.start(2, train_normalised))
        for island in started:
            island.finish()
        found = [island.result() for island in started]
    (_, first, digest), *others = found
    assert all(theirs == digest for _, _, theirs in others)
    for _, theirs, _ in others:
        assert torch.equal(first["1.running_mean"], theirs["1.running_mean"])
        assert torch.equal(first["1.running_var"], theirs["1.running_var"])
    entered = found[2][0]
    assert entered["1.num_batches_tracked"] > 0 and entered["1.running_mean"].any()


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("large", torch.tensor([1 << 30]))


@pytest.mark.parametrize(
    "named, text",
    [
        (
            {"means": "mean"},
            "the model has no buffer 'means'; its buffers: mean, count, phase, nothing, ...",
        ),
        ({"mean": "sum"}, "got 'sum' for 'mean'; allowed: mean, donor"),
        ({"mean": "mean", "m*": "donor"}, "'mean' is named both as mean and as donor"),
        ({"count": "mean"}, "'count' is int64, of which there is no mean; name it as donor"),
        ({"phase": "donor"}, "'phase' is complex64, and values travel in float32"),
        ({"nothing": "mean"}, "'nothing' has the shape (0,); leave it out"),
        ({"large": "donor"}, "'large' is int64 and holds values above 16777216"),
    ],
)
def test_a_buffer_that_islands_cannot_share_is_refused(named: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"buffers: {text}")):
        OwnBuffers(RankGroup(), Many(), named)


def test_named_buffers_are_part_of_the_runs_identity() -> None:
    texts = [
        OwnBuffers(RankGroup(), Many(), named).text
        for named in (None, {"mean": "mean"}, {"mean": "donor"})
    ]
    assert texts[0] == "" and len(set(texts)) == 3


def test_a_buffer_that_changes_and_is_not_named_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = normalised()
    watched = OwnBuffers(RankGroup(), model, {"1.running_var": "mean"})
    with caplog.at_level(logging.WARNING):
        watched.watch.warn_of_changes()
        assert not caplog.records
        model(torch.randn(3, 4))
        watched.watch.warn_of_changes()
        watched.watch.warn_of_changes()
    assert len(caplog.records) == 1
    assert (
        "each island has its own: 1.running_mean. If" in caplog.text
        and "running_var" not in caplog.text
    )


def test_a_buffer_that_is_written_with_equal_values_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = normalised()
    watched = OwnBuffers(RankGroup(), model, None)
    model.load_state_dict(model.state_dict())
    norm = model.get_submodule("1")
    norm.register_buffer("running_mean", norm.get_buffer("running_mean").clone())
    watched.watch.warn_of_changes()
    assert not caplog.records
