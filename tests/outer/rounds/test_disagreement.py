"""Whole islands, of which one computes wrongly or all send nan: the honest ones go on, or all stop
and say why.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from outer.config import OuterConfig
from outer.errors import BehindError, OuterError
from outer.hooks import Hooks, NoHooks
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.report import CaughtUp, RoundReport
from outer.transports.base import Transport
from outer.transports.loopback import Hub
from tests.outer.islands import GUARD_SECONDS, ForwardingTransport, Island, run_islands

torch.set_num_threads(1)


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "transport": "loopback",
        "wait_seconds": GUARD_SECONDS,
        "codec": "fp32",
    }
    return OuterConfig(**{**fields, **changes})


class WrongMeans(ForwardingTransport):
    """A transport that falsifies the means that this island receives, as broken memory would."""

    def __init__(self, inner: Transport, is_wrong: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._is_wrong = is_wrong

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        payload = (await super().recv(source, tag, num_bytes)).clone()
        if tag.leg is Leg.GATHER and self._is_wrong(tag.round):
            payload[0] ^= 1
        return payload


def wrong_means(is_wrong: Callable[[int], bool]) -> Callable[[Hub, Transport], Transport]:
    return lambda hub, inner: WrongMeans(inner, is_wrong)


class NanPayloads(NoHooks):
    """Every payload that this island sends in the rounds of `is_nan` holds nan, up to `times`
    attempts.
    """

    def __init__(self, times: int) -> None:
        self._left = times

    def reached(self, phase: str, round_number: int) -> None:
        if phase == "send":
            self._left -= 1

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        if self._left < 0 or round_number != 1:
            return payload
        values = payload.clone().view(torch.float32)
        values[0] = float("nan")
        return values.view(torch.uint8)


def reports_of(island: Island, rounds: int) -> list[RoundReport]:
    """All attempts until so many rounds are committed; states of others are taken when this island
    is behind.
    """
    island.outer.begin()
    reports: list[RoundReport] = []
    while island.outer.position.round < rounds:
        island.train(island.outer.position.round)
        try:
            reports.append(island.attempt(100))
            while not reports[-1].is_committed:
                reports.append(island.attempt(100))
        except (BehindError, CaughtUp):
            continue
    island.outer.finish()
    return reports


def test_one_of_three_that_computes_wrongly_is_named_and_left_out_and_takes_the_others_state() -> (
    None
):
    scripts = dict.fromkeys(
        "abc", lambda island: (reports_of(island, 4), island.state(), island.outer.digest)
    )
    found = run_islands(scripts, config(3), faults={"c": wrong_means(lambda number: number == 1)})
    assert len({digest for _, _, digest in found.values()}) == 1
    reports = found["a"][0]
    failed = [report for report in reports if not report.is_committed]
    assert failed and all("c: its digest" in report.cause for report in failed)
    by_round = {report.round: report.participants for report in reports if report.is_committed}
    assert by_round[1] == ["a", "b"]


def test_one_of_three_that_always_computes_wrongly_holds_up_nobody() -> None:
    scripts: dict[str, Callable[[Island], Any]] = dict.fromkeys(
        "ab", lambda island: (reports_of(island, 6), island.outer.digest)
    )

    def until_it_gives_up(island: Island) -> None:
        # After three wrong means in a row it ends, if it took part in so many attempts.
        with suppress(OuterError):
            reports_of(island, 6)

    scripts["c"] = until_it_gives_up
    found = run_islands(scripts, config(3), faults={"c": wrong_means(lambda number: True)})
    assert found["a"][1] == found["b"][1]
    assert all(report.participants == ["a", "b"] for report in found["a"][0] if report.is_committed)


def test_of_two_that_compute_differently_both_stop_and_print_both_digests() -> None:
    def differ(island: Island) -> str:
        with pytest.raises(OuterError, match="no majority found the same") as error:
            reports_of(island, 2)
        return str(error.value)

    texts = run_islands(
        dict.fromkeys("ab", differ), config(2), faults={"b": wrong_means(lambda number: True)}
    )
    assert all("a " in text and "b " in text for text in texts.values())


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_islands_that_all_send_nan_once_go_on(names: str) -> None:
    hooks: dict[str, Hooks] = {name: NanPayloads(times=1) for name in names}
    scripts = dict.fromkeys(names, lambda island: (reports_of(island, 3), island.outer.digest))
    found = run_islands(scripts, config(len(names)), hooks=hooks)
    assert len({digest for _, digest in found.values()}) == 1
