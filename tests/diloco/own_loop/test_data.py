"""`diloco.data`: the text of a run in loops of one's own, as islands over real sockets."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import diloco
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account, units_of
from tests.diloco.own_loop.loops import STEPS, own_config, small_model
from tests.swarm import swarm

SEQ_LEN, SEQUENCES = 8, 4
DATA = {"source": "files", "seq_len": SEQ_LEN, "heldout_fraction": 0.3}


class Bigram(nn.Module):
    """Logits of the next byte from the byte before."""

    def __init__(self, vocab_size: int = 260) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def config_with_data(
    config: Config, index: int, more: dict[str, Any] | None = None, **outer: Any
) -> dict[str, Any]:
    """The config of a loop that reads the text of a swarm; `more` sections replace those that all
    have.
    """
    there = config.for_island(index)
    place = {"cache_dir": there.cache_dir, "data_paths": config.data.paths}
    own = own_config(config, index, place, **outer)
    return (
        own | {"data": DATA, "optimizer": {"tokens_per_step": SEQ_LEN * SEQUENCES}} | (more or {})
    )


IN_SHARDS = DATA | {"order": "shards", "shard_tokens": 256}
STAGES = [
    {"tokens": 2 * 2 * STEPS * SEQ_LEN * SEQUENCES},
    {"tokens": 2 * STEPS * 64, "seq_len": 16, "tokens_per_step": 64},
    {"tokens_per_step": 16},
]
SHAPES = [(4, 8)] * 4 + [(4, 16)] * 2 + [(2, 8)] * 4
"""Of the batches of an island, in five rounds."""


def train_bigram(
    stop_after: int | None = None, more: dict[str, Any] | None = None, **outer: Any
) -> Callable[[Config, int], Any]:
    """The work of an island that trains on the run's text. Returns what it read: (inputs, targets)
    of each batch.
    """

    def work(config: Config, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if config.for_island(index).ranks > 1:
            dist.init_process_group("gloo")
        model = Bigram()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        islands = diloco.Islands(config_with_data(config, index, more, **outer), model, optimizer)
        read = []
        for batch in diloco.data(islands):
            loss = cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read.append((batch.inputs, batch.targets))
            islands.step(tokens=batch.num_tokens, loss=loss)
            if len(read) == stop_after:
                break
        islands.leave()
        return read

    return work


def test_each_unit_of_the_text_is_read_by_one_island(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(train_bigram()):
            island.finish()
        batches = [batch for island in made.started for batch in island.result()]
    assert all(inputs.shape == (SEQUENCES, SEQ_LEN) for inputs, _ in batches)
    assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in batches)
    account = data_account(read_run(tmp_path / "own").islands)
    assert (account["units_trained"], account["units_repeated"]) == (len(batches), 0)


def test_stages_change_the_batches_of_text_in_shards(tmp_path: Path) -> None:
    more = {"data": IN_SHARDS, "stages": STAGES}
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(train_bigram(more=more, rounds=5)):
            island.finish()
        found = [island.result() for island in made.started]
    assert [[tuple(inputs.shape) for inputs, _ in batches] for batches in found] == [SHAPES, SHAPES]
    account = data_account(read_run(tmp_path / "own").islands)
    assert (account["units_trained"], account["units_repeated"]) == (2 * len(SHAPES), 0)


def train_staged(saved_after: int | None = None) -> Callable[[Config, int], str]:
    """The work of an island in a run with STAGES, whose learning rate follows them. Returns the
    last digest.

    It goes on from what was saved, if anything was. With `saved_after` it saves after so many
    steps, makes one more and is killed.
    """

    def work(config: Config, index: int) -> str:
        path = Path(config.for_island(index).run_dir) / f"saved-{index}.pt"
        saved = torch.load(path, weights_only=True) if path.exists() else {}
        model = Bigram()
        model.load_state_dict(saved.get("model", model.state_dict()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        more = {"data": IN_SHARDS, "stages": STAGES}
        own = config_with_data(config, index, more, rounds=5, quorum=2)
        islands = diloco.Islands(own, model, optimizer, state=saved.get("islands"))
        for made, batch in enumerate(diloco.data(islands), start=1):
            optimizer.param_groups[0]["lr"] = (1e-2, 1e-3, 1e-4)[islands.stage]
            cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if saved_after is not None and made > saved_after:
                os.kill(os.getpid(), signal.SIGKILL)
            islands.step(tokens=batch.num_tokens)
            if made == saved_after:
                torch.save({"model": model.state_dict(), "islands": islands.state_dict()}, path)
        return islands.digest

    return work


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 5, 6], ids=["first stage", "second stage", "border"])
def test_loops_killed_in_any_stage_go_on_bit_for_bit(tmp_path: Path, steps: int) -> None:
    with swarm(tmp_path / "whole", islands=[{}, {}]) as made:
        for island in made.start_all(train_staged()):
            island.finish()
        digest = made.started[0].result()
    with swarm(tmp_path / "broken", islands=[{}, {}]) as made:
        for island in made.start_all(train_staged(saved_after=steps)):
            assert island.wait() == [-signal.SIGKILL], island.log
        for island in made.start_all(train_staged()):
            island.finish()
            assert island.result() == digest
        account = data_account(read_run(tmp_path / "broken" / "own").islands)
    assert (account["units_trained"], account["units_repeated"]) == (2 * len(SHAPES), 0)


@pytest.mark.slow
def test_the_ranks_of_an_island_share_each_unit(tmp_path: Path) -> None:
    with swarm(tmp_path / "one", islands=[{}]) as made:
        alone = made.start(0, train_bigram())
        alone.finish()
        whole = alone.result()
    with swarm(tmp_path / "two", islands=[{"ranks": 2}]) as made:
        two = made.start(0, train_bigram())
        two.finish()
        first = two.result()
    assert all(
        torch.equal(all_of[0][: SEQUENCES // 2], half[0])
        for all_of, half in zip(whole, first, strict=True)
    )


def test_an_island_that_leaves_gives_its_units_to_the_other(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, train_bigram(rounds=8))
        made.start(1, train_bigram(stop_after=3, rounds=8))
        for island in made.started:
            island.finish()
    islands = read_run(tmp_path / "own").islands
    of_first = {
        unit for record in islands[0].rounds if record.committed for unit in units_of(record)
    }
    read_in_vain = STEPS * 2 + 1  # the second island made one step of its second round
    account = data_account(islands)
    assert account["units_repeated"] == 0
    assert read_in_vain in of_first


def test_a_text_that_the_loop_does_not_read_ends_its_first_step(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        model = small_model()
        islands = diloco.Islands(config_with_data(config, index), model)
        with pytest.raises(ConfigError, match=r"take the batches from diloco\.data"):
            islands.step(tokens=1)
        with pytest.raises(ConfigError, match="make tokens_per_step a multiple of 24"):
            diloco.data(islands, rank=0, num_ranks=3)
        next(iter(diloco.data(islands)))
        with pytest.raises(RuntimeError, match=r"state_dict: a unit of data was taken"):
            islands.state_dict()
        held = list(diloco.data(islands).heldout(num_tokens=100, batch_size=4))
        assert all(batch.inputs.min() >= 0 for batch in held)
        assert sum(batch.num_tokens for batch in held) == -(-100 // SEQ_LEN) * SEQ_LEN

    with swarm(tmp_path, islands=[{}]) as made:
        made.start(0, work).finish()


def test_data_without_a_text_in_the_config_is_refused(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        islands = diloco.Islands(own_config(config, index), small_model())
        with pytest.raises(ConfigError, match="the config has no `data`"):
            diloco.data(islands)

    with swarm(tmp_path, islands=[{}]) as made:
        made.start(0, work).finish()
