"""Gossip: which text an island reads, and going on from what was saved."""

import threading
from itertools import chain
from typing import Any

import pytest
import torch

from outer.config import GossipConfig, OuterConfig
from outer.errors import InputError
from outer.leases.ledger import Ledger
from outer.leases.static_cursor import StaticCursor
from tests.outer.islands import GUARD_SECONDS, Island, run_islands

torch.set_num_threads(1)

STEPS, ROUNDS = 2, 4


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "rounds": ROUNDS,
        "inner_steps": STEPS,
        "wait_seconds": GUARD_SECONDS / 2,
    }
    return OuterConfig(gossip=GossipConfig(), transport="loopback", **{**fields, **changes})


def all_of(reading: StaticCursor) -> list[int]:
    return [reading.next_unit() for _ in range(reading.num_left)]


def test_islands_of_the_start_read_a_step_of_the_data_parallel_run_together() -> None:
    read = [all_of(StaticCursor(config(3), index, joins=False)) for index in range(3)]
    assert read[1] == [1, 4, 7, 10, 13, 16, 19, 22]
    assert sorted(chain.from_iterable(read)) == list(range(3 * ROUNDS * STEPS))


def test_islands_that_come_late_read_what_nobody_else_does() -> None:
    everybody = [(index, False) for index in range(6)] + [(index, True) for index in range(3)]
    read = [
        unit
        for index, joins in everybody
        for unit in all_of(StaticCursor(config(3), index, joins=joins))
    ]
    assert len(set(read)) == len(read) == 9 * ROUNDS * STEPS


def test_what_is_read_follows_from_the_step() -> None:
    cursor = StaticCursor(config(3), 1, joins=False)
    cursor.begin(2, Ledger())
    done = 2 * STEPS
    assert cursor.read == () and cursor.num_left == ROUNDS * STEPS - done
    cursor.resume(1)
    assert cursor.next_unit() == (done + 1) * 3 + 1
    assert cursor.read == (range(done * 3 + 1, (done + 2) * 3 + 1, 3),)


def make_rounds(island: Island, count: int) -> list[int]:
    """The units read."""
    read = []
    for _ in range(count):
        read += [island.outer.cursor.next_unit() for _ in range(STEPS)]
        island.train(island.outer.position.round)
        island.outer.launch(100)
        report = island.outer.land().reports[0]
        assert list(chain.from_iterable(report.units)) == read[-STEPS:]
        assert report.base == "", "summaries show an account where there is a base"
    return read


def end_of(island: Island) -> tuple[str, torch.Tensor]:
    island.outer.finish()
    return island.outer.digest, island.params.flat()


def whole_run(island: Island) -> tuple[Any, list[int]]:
    island.outer.begin()
    read = make_rounds(island, ROUNDS)
    return end_of(island), read


def first_half(island: Island) -> tuple[Any, Any, Any, list[int]]:
    """Two rounds, and one inner step of the third."""
    island.outer.begin()
    read = make_rounds(island, 2)
    read.append(island.outer.cursor.next_unit())
    tensors, facts = island.outer.save()
    saved = {name: values.clone() for name, values in tensors.items()}
    island.outer.finish()
    return saved, facts, [values.clone() for values in island.params.values], read


def restored(island: Island, half: tuple[Any, Any, Any, list[int]]) -> None:
    tensors, facts, values, _ = half
    for mine, saved in zip(island.params.values, values, strict=True):
        mine.copy_(saved)
    room = island.outer.allocate(tensors)
    assert room.keys() == tensors.keys()
    for name, space in room.items():
        space.copy_(tensors[name])
    island.outer.restore(room, facts)


def test_islands_that_stop_in_a_round_end_as_if_they_had_not() -> None:
    names = "abcd"
    whole = run_islands(dict.fromkeys(names, whole_run), config(4))
    halves = run_islands(dict.fromkeys(names, first_half), config(4))

    def second_half(island: Island) -> tuple[Any, list[int]]:
        restored(island, halves[island.name])
        assert island.outer.begin().round == 2
        read = [island.outer.cursor.next_unit()]
        island.train(2)
        island.outer.launch(100)
        island.outer.land()
        read += make_rounds(island, 1)
        return end_of(island), read

    found = run_islands(dict.fromkeys(names, second_half), config(4))
    assert len({digest for (digest, _), _ in found.values()}) == 4
    for name in names:
        (digest, params), read = found[name]
        (wanted_digest, wanted), all_read = whole[name]
        assert digest == wanted_digest and torch.equal(params, wanted)
        assert halves[name][3] + read == all_read


def test_who_goes_on_from_a_checkpoint_takes_the_params_of_those_that_are_ahead() -> None:
    half = run_islands({"b": first_half}, config(1))["b"]
    at_three, done = threading.Event(), threading.Event()

    def ahead(island: Island) -> torch.Tensor:
        island.outer.begin()
        make_rounds(island, 3)
        at_three.set()
        assert done.wait(GUARD_SECONDS)
        return island.params.flat()

    def behind(island: Island) -> torch.Tensor:
        try:
            restored(island, half)
            assert at_three.wait(GUARD_SECONDS)
            assert island.outer.begin().round == 3
            assert island.outer.cursor.read == () and island.outer.cursor.num_left == STEPS
            return island.params.flat()
        finally:
            done.set()

    found = run_islands({"a": ahead, "b": behind}, config(1))
    assert torch.equal(found["a"], found["b"])


def test_a_checkpoint_of_other_global_params_than_it_says_is_refused() -> None:
    tensors, facts, values, read = run_islands({"a": first_half}, config(1))["a"]
    tensors["outer/params/0"][0] += 1

    def go_on(island: Island) -> None:
        with pytest.raises(InputError, match="digest"):
            restored(island, (tensors, facts, values, read))

    run_islands({"a": go_on}, config(1))
