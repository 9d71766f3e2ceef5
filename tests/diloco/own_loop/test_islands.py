"""`diloco.Islands` in training loops that are not ours, as islands over real sockets."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.model.params import trained_params
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.train import train
from tests.diloco.own_loop.loops import (
    ROUNDS,
    STEPS,
    TOKENS,
    ModelAndDigest,
    finish,
    folder_of,
    one_step,
    own_config,
    small_model,
    train_from_saved,
    train_on_ranks,
    train_saving_and_die,
    train_small,
)
from tests.faults.waits import until
from tests.swarm import GUARD_SECONDS, Island, read_records, swarm

STREAMED = {
    "fragments": 2,
    "fragment_pattern": "balanced",
    "delay": 1,
    "inner_steps": 4,
    "codec": "int4",
    "rounds": 2,
}


def records(folder: Path, kind: str, index: int = 0) -> list[dict[str, Any]]:
    found = read_records(folder / "own" / f"island-{index}" / "metrics.jsonl")
    return [record for record in found if record["kind"] == kind]


def assert_equal_ends(islands: list[Island]) -> None:
    (params, digest), *others = (island.result() for island in islands)
    for theirs, same in others:
        assert digest == same
        assert all(torch.equal(values, theirs[name]) for name, values in params.items())


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param({}, id="plain"),
        pytest.param(STREAMED, id="streamed, int4"),
        pytest.param({"moments": [1, 2]}, id="moments", marks=pytest.mark.slow),
    ],
)
def test_two_loops_of_ones_own_end_with_the_same_digest(
    tmp_path: Path, outer: dict[str, Any]
) -> None:
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(train_small(**outer)):
            island.finish()
        digests = {island.result()[1] for island in made.started}
    assert len(digests) == 1


def test_rounds_and_steps_are_recorded(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}]) as made:
        made.start(0, train_small()).finish()
    steps, rounds = records(tmp_path, "step"), records(tmp_path, "round")
    assert [step["step"] for step in steps] == list(range(1, ROUNDS * STEPS + 1))
    assert all(step["loss"] > 0 and step["lr"] == 1e-2 for step in steps)
    assert [(each["committed"], each["tokens"]) for each in rounds] == [
        (True, STEPS * TOKENS)
    ] * ROUNDS


def test_a_loop_of_ones_own_tells_its_operator_of_a_full_disk(tmp_path: Path) -> None:
    sent = tmp_path / "alert.json"
    alerts = {"command": ["tee", str(sent)], "disk_share": 1e-9}
    with swarm(tmp_path, islands=[{}]) as made:
        made.start(0, train_small(island={"alerts": alerts})).finish()
    alert = json.loads(sent.read_text())
    assert (alert["rule"], alert["run"], alert["island"]) == ("disk_share", "own", "island-0")


def test_a_joiner_takes_the_parameters_of_the_others(tmp_path: Path) -> None:
    def begin(config: Config, index: int) -> Any:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        islands = Islands(own_config(config, index, start_islands=1, rounds=6), model, optimizer)
        while islands.round < 3:
            islands.step(tokens=TOKENS)
        until(lambda: bool(records(tmp_path, "event", 1)), "the joiner has entered")
        return finish(islands, model, optimizer)

    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, begin)
        until(lambda: len(records(tmp_path, "round")) == 3, "three rounds alone")
        made.start(1, train_small(1, {"joins": True}, start_islands=1, rounds=6))
        for island in made.started:
            island.finish()
        assert_equal_ends(made.started)
    assert records(tmp_path, "event", 1)[0]["text"].startswith("round 3")


def test_a_joiner_that_comes_before_the_first_commit_waits_for_it(tmp_path: Path) -> None:
    def begin_late(config: Config, index: int) -> ModelAndDigest:
        until(lambda: (tmp_path / "own" / "LOGBOOK.md").exists(), "the joiner has been started")
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        islands = Islands(own_config(config, index, start_islands=1, rounds=6), model, optimizer)
        while islands.round < 3:
            islands.step(tokens=TOKENS)
        until(lambda: bool(records(tmp_path, "event", 1)), "the joiner has entered")
        return finish(islands, model, optimizer)

    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(1, train_small(1, {"joins": True}, start_islands=1, rounds=6))
        made.start(0, begin_late)
        for island in made.started:
            island.finish()
        (_, first), (_, second) = (island.result() for island in made.started)
    assert first == second


@pytest.mark.parametrize("outer", [{}, STREAMED], ids=["plain", "streamed, int4"])
def test_islands_killed_in_a_round_end_as_if_nothing_had_been(
    tmp_path: Path, outer: dict[str, Any]
) -> None:
    both = outer | {"quorum": 2}
    with swarm(tmp_path / "whole", islands=[{}, {}]) as made:
        for island in made.start_all(train_small(**both)):
            island.finish()
        whole = [island.result() for island in made.started]
    with swarm(tmp_path / "broken", islands=[{}, {}]) as made:
        for island in made.start_all(train_saving_and_die(tmp_path, 3, **both)):
            assert island.wait() == [-signal.SIGKILL]
        for island in made.start_all(train_from_saved(tmp_path, **both)):
            island.finish()
        broken = [island.result() for island in made.started[2:]]
    assert [digest for _, digest in whole] == [digest for _, digest in broken]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_an_island_of_two_ranks_and_one_of_one_rank_agree(tmp_path: Path, wrap: Any) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}, {}]) as made:
        two, one = (
            made.start(0, train_on_ranks(wrap)),
            made.start(1, train_on_ranks(lambda model: model)),
        )
        for island in (two, one):
            island.finish()
        assert two.result() == one.result()
    assert records(tmp_path, "round")[-1]["tokens"] == 2 * STEPS * TOKENS, "those of both ranks"


def test_what_fsdp2_has_gathered_for_an_evaluation_is_no_other_parameter(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        model = fsdp2(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        islands = Islands(own_config(config, index), model, optimizer)
        while not islands.is_over:
            one_step(model, optimizer, islands.round)
            with torch.no_grad():
                model(torch.zeros(1, 4))
            islands.step(tokens=TOKENS)
        assert islands.round == ROUNDS

    with swarm(tmp_path, islands=[{"ranks": 2}]) as made:
        made.start(0, work).finish()


@pytest.mark.parametrize("sizes", [(4, 5), (4, 4)], ids=["other shapes", "other values"])
def test_stages_that_are_numbered_from_0_on_each_rank_are_refused(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        with pytest.raises(ConfigError, match=r"of this island hold .*'weight'.* with different"):
            Islands(own_config(config, index), nn.Linear(4, sizes[dist.get_rank()]))

    with swarm(tmp_path, islands=[{"ranks": 2}]) as made:
        made.start(0, work).finish()


def test_only_parameters_that_require_gradients_travel(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> tuple[Any, str]:
        model = nn.Sequential(small_model().requires_grad_(False), nn.Linear(1, 1))
        torch.manual_seed(index)
        frozen = model[0][0].weight
        frozen.data.normal_()
        torch.manual_seed(0)
        model[1].reset_parameters()
        before = frozen.clone()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-2)
        result = finish(Islands(own_config(config, index), model, optimizer), model, optimizer)
        assert torch.equal(frozen, before)
        return {name: value for name, value in result[0].items() if name.startswith("1.")}, result[
            1
        ]

    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(work):
            island.finish()
        assert_equal_ends(made.started)


def test_the_ten_lines_on_our_own_model_give_the_digests_of_diloco_train(tmp_path: Path) -> None:
    def own(config: Config, index: int) -> None:
        def live(parts: Runtime) -> None:
            trainer, run = (
                parts.trainer,
                own_config(config, index, **config.outer.model_dump(mode="json")),
            )
            islands = Islands(run, trainer.model_parts[0], trainer.optimizers)
            for unit in islands.units():
                islands.step(tokens=trainer.step(parts.batches.micro_batches(unit, 0, 1, 4)).tokens)

        config = config.model_copy(
            update={"outer": config.outer.model_copy(update={"start_islands": 2})}
        )
        train(config, index, live)

    digests = []
    for folder, work, name in ((tmp_path / "ours", train, "test"), (tmp_path / "own", own, "own")):
        with swarm(folder, "outer.delay=1", "outer.quorum=2", islands=[{}, {}]) as made:
            for island in made.start_all(work):
                island.finish()
        found = read_records(folder / name / "island-0" / "metrics.jsonl")
        digests.append(
            [each["digest"] for each in found if each["kind"] == "round" and each["committed"]]
        )
    assert len(digests[0]) == 3 and digests[0] == digests[1]


def test_another_model_is_refused_with_both_descriptions_and_the_first_difference(
    tmp_path: Path,
) -> None:
    def work(config: Config, index: int) -> None:
        if index == 0:
            Islands(own_config(config, index), small_model())
            time.sleep(GUARD_SECONDS)
        until(
            lambda: read_records(folder_of(config, 0) / "metrics.jsonl"),
            "the first island is there",
        )
        Islands(own_config(config, index), nn.Linear(4, 1))

    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, work)
        second = made.start(1, work)
        assert second.wait() == [1]
        assert "params: here '2 parameters with 5 elements" in second.log
        assert "in the run '4 parameters with 49 elements" in second.log
        different = (
            "the first parameter that differs: here 'weight [1, 4]', in the run '0.weight [8, 4]'"
        )
        assert different in second.log


def test_the_view_looks_through_compiled_models() -> None:
    names = [spec.name for spec in trained_params(torch.compile(small_model())).specs]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


QUORUM = {"wait_for": "quorum", "quorum": 1, "rounds": 4}


def test_loops_of_unequal_speed_go_on_with_a_quorum_and_end_with_one_digest(tmp_path: Path) -> None:
    tokens = {"optimizer": {"tokens_per_step": TOKENS}}
    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, train_small(more=tokens, **QUORUM))
        made.start(1, train_small(island={"faults": ["slow:1x4"]}, more=tokens, **QUORUM))
        for island in made.started:
            island.finish()
        (_, first), (_, second) = (island.result() for island in made.started)
    assert first == second
    committed = [record for record in records(tmp_path, "round") if record["committed"]]
    assert sum(len(record["listeners"]) for record in committed) > 0, "the slow one observes"
    account = data_account(read_run(tmp_path / "own").islands)
    assert account["units_repeated"] == 0


def test_islands_that_wait_for_a_quorum_are_killed_and_go_on_from_what_they_saved(
    tmp_path: Path,
) -> None:
    tokens = {"optimizer": {"tokens_per_step": TOKENS}}
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(
            train_saving_and_die(tmp_path, 3, more=tokens, **QUORUM | {"quorum": 2})
        ):
            assert island.wait() == [-signal.SIGKILL]
        for island in made.start_all(
            train_from_saved(tmp_path, more=tokens, **QUORUM | {"quorum": 2})
        ):
            island.finish()
        (_, first), (_, second) = (island.result() for island in made.started[2:])
    assert first == second
    joined = [event["text"] for event in records(tmp_path, "event") if event["name"] == "joined"]
    assert not joined[1].startswith("round 0"), "it goes on"
    assert data_account(read_run(tmp_path / "own").islands)["units_repeated"] == 0
