"""Whole islands with `outer.audit`: a reducer that lies is found and named, and honest rounds are
what they were.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch

from outer.agreement.messages import Plan
from outer.audits.commitments import SignedPayload
from outer.audits.kept_payloads import KeptPayloads, _KeptPart
from outer.config import CodingConfig, MergeConfig, OuterConfig
from outer.cost import round_bytes
from outer.errors import AuditError, BehindError, TransportError
from outer.hooks import NoHooks
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.reduce import auditor
from outer.report import CaughtUp, RoundReport
from outer.rounds.agreed import AgreedAverager
from outer.rounds.island_reduce import IslandReduce
from outer.transports.base import Transport
from tests.outer.islands import (
    GUARD_SECONDS,
    ForwardingTransport,
    Island,
    Spec,
    fails_in,
    run_islands,
    tensors,
)
from tests.outer.nets import key_of
from tests.outer.rounds.test_disagreement import reports_of

torch.set_num_threads(1)

ROUNDS = 3


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "transport": "loopback",
        "wait_seconds": GUARD_SECONDS,
        "codec": "fp32",
    }
    return OuterConfig(**{**fields, "audit": 1.0, **changes})


def reduce_of(island: Island) -> IslandReduce:
    assert isinstance(island.outer.averager, AgreedAverager)
    return island.outer.averager.runner.reduce


def kept_of(island: Island) -> KeptPayloads:
    kept = reduce_of(island).attempts.reducer._rank.kept
    assert kept is not None
    return kept


def lie(island: Island) -> None:
    """From now on this island sends a wrong mean of each part that it reduces, the same to all and
    to itself.
    """
    attempts = reduce_of(island).attempts
    payloads, attempts._auditor = attempts.reducer.payloads, None
    honest: Callable[[int, torch.Tensor], torch.Tensor] = payloads.encode_mean
    payloads.encode_mean = lambda part, mean: honest(part, mean * 3)  # type: ignore[method-assign]


def in_step(island: Island, rounds: int, barrier: threading.Barrier) -> list[RoundReport]:
    """All attempts until so many rounds are committed. No island begins a round before all hold its
    state.
    """
    island.outer.begin()
    reports: list[RoundReport] = []
    for number in range(rounds):
        barrier.wait(GUARD_SECONDS)
        island.train(number)
        with suppress(BehindError, CaughtUp):
            while island.outer.position.round == number:
                reports.append(island.attempt(100))
    return reports


def lying(island: Island) -> list[RoundReport]:
    lie(island)
    return reports_of(island, ROUNDS)


def is_named(found: Mapping[str, Sequence[RoundReport]], liar: str, text: str) -> bool:
    """Whether an honest island has accused the liar of this, and every round was committed without
    it.

    An honest island whose attempt was ended by another's no may know another cause.
    """
    honest = [reports for name, reports in found.items() if name != liar]
    causes = [report.cause for reports in honest for report in reports if not report.is_committed]
    others = [name for name in found if name != liar]
    has_text = any(f"island {liar!r}" in cause and text in cause for cause in causes)
    return has_text and all(
        r.participants == others for reports in honest for r in reports if r.is_committed
    )


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_reducer_that_sends_a_wrong_mean_to_all_is_named_and_left_out(names: str) -> None:
    scripts: dict[str, Callable[[Island], list[RoundReport]]] = dict.fromkeys(
        names, partial(reports_of, rounds=ROUNDS)
    )
    found = run_islands(scripts | {names[-1]: lying}, config(len(names)))
    assert is_named(found, names[-1], "is not the mean of the payloads that it received")
    assert [report.round for report in found["a"] if report.is_committed] == list(range(ROUNDS))


def test_without_audits_its_mean_is_committed_by_all() -> None:
    def lying_unseen(island: Island) -> tuple[list[RoundReport], str]:
        lie(island)
        return honest(island)

    def honest(island: Island) -> tuple[list[RoundReport], str]:
        return reports_of(island, ROUNDS), island.outer.digest

    found = run_islands({"a": honest, "b": honest, "c": lying_unseen}, config(3, audit=0.0))
    assert not any(
        "mean of part" in report.cause for reports, _ in found.values() for report in reports
    )
    assert all(
        report.participants == ["a", "b", "c"] for report in found["a"][0] if report.is_committed
    )
    assert len({digest for _, digest in found.values()}) == 1


CASES = [
    {"codec": "fp32"},
    {"codec": "int8", "merge": MergeConfig(rule="trimmed_mean", max_norm_ratio=2.0)},
    {"codec": "int4", "coding": CodingConfig(rounding="stochastic")},
    {"codec": "topk"},
]


@pytest.mark.parametrize("changes", CASES, ids=[str(case["codec"]) for case in CASES])
def test_honest_rounds_commit_the_same_bits_with_audits_as_without(
    changes: Mapping[str, object],
) -> None:
    def script(island: Island) -> tuple[list[str], int]:
        reports = reports_of(island, ROUNDS)
        return [report.digest for report in reports if report.is_committed], sum(
            report.audited for report in reports
        )

    configs = [config(3, audit=probability, **changes) for probability in (0.0, 1.0)]
    model = partial(
        tensors, scale=40
    )  # Every island reduces some parts, in spite of the codecs' blocks.
    without, with_audits = (
        run_islands(dict.fromkeys("abc", script), each, model=model) for each in configs
    )
    assert {name: digests for name, (digests, _) in without.items()} == {
        n: d for n, (d, _) in with_audits.items()
    }
    assert [audited for _, audited in without.values()] == [0, 0, 0]
    assert all(audited > 0 for _, audited in with_audits.values())


def swap_own_and_others(kept: KeptPayloads, part: int, of: _KeptPart) -> _KeptPart:
    """What the reducer shows for each contributor is another's payload."""
    names = list(of.payloads)
    return replace(of, payloads=dict(zip(names, reversed(of.payloads.values()), strict=True)))


def show_the_right_mean(kept: KeptPayloads, part: int, of: _KeptPart) -> _KeptPart:
    """The reducer says to have sent what it should have sent."""
    return replace(of, mean=(of.mean.view(torch.float32) / 3).view(torch.uint8))


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (swap_own_and_others, "has not sent"),
        (show_the_right_mean, "is not the one in its statement"),
    ],
)
def test_a_reducer_that_shows_other_things_than_it_used_is_named(
    forge: Callable[[KeptPayloads, int, _KeptPart], _KeptPart], text: str
) -> None:
    def forging(island: Island) -> list[RoundReport]:
        lie(island)
        kept = kept_of(island)
        keep = kept.keep

        def keep_forged(
            part: int, payloads: Mapping[str, SignedPayload], mean: torch.Tensor
        ) -> None:
            forged = forge(kept, part, _KeptPart(payloads, mean))
            keep(part, forged.payloads, forged.mean)

        kept.keep = keep_forged  # type: ignore[method-assign]
        return reports_of(island, ROUNDS)

    honest = partial(reports_of, rounds=ROUNDS)
    found = run_islands({"a": honest, "b": honest, "c": forging}, config(3))
    assert is_named(found, "c", text)


def test_a_reducer_that_lied_once_is_refused_in_later_rounds() -> None:
    def lying_in_step(island: Island) -> list[RoundReport]:
        lie(island)
        return in_step(island, 3, barrier)

    barrier = threading.Barrier(3)
    honest = partial(in_step, rounds=3, barrier=barrier)
    found = run_islands({"a": honest, "b": honest, "c": lying_in_step}, config(3))
    assert is_named(found, "c", "is not the mean of the payloads that it received")
    refused = {
        r.round
        for name in "ab"
        for r in found[name]
        if "audits have found 1 wrong means of island 'c'" in r.cause
    }
    assert refused == {1, 2}


def test_a_reducer_that_shows_nothing_is_accused_and_from_the_second_time_on_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditor, "PING_SECONDS", 0.0)
    monkeypatch.setattr(
        Deadlines, "limit", lambda self, kind: 0.2 if kind == "call" else GUARD_SECONDS
    )
    barrier = threading.Barrier(3)

    def hiding(island: Island) -> list[RoundReport]:
        def find(*_: object) -> None:
            raise TransportError("no")

        kept_of(island)._find = find  # type: ignore[method-assign]
        return in_step(island, 4, barrier)

    honest = partial(in_step, rounds=4, barrier=barrier)
    found = run_islands({"a": honest, "b": honest, "c": hiding}, config(3))
    assert is_named(found, "c", "does not show the payloads of part")
    assert is_named(found, "c", "did not show the payloads of 2 parts")


def test_a_contributor_whose_payloads_lack_its_signature_is_accused_and_not_the_reducer() -> None:
    def unsigned(island: Island) -> list[RoundReport]:
        commitments = kept_of(island).commitments
        commitments.key = key_of("somebody else")
        return reports_of(island, ROUNDS)

    honest = partial(reports_of, rounds=ROUNDS)
    found = run_islands({"a": honest, "b": honest, "c": unsigned}, config(3))
    assert is_named(found, "c", "without its signature")


def test_poison_that_its_contributor_signed_blames_no_reducer() -> None:
    class Poison(NoHooks):
        def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
            return values * -10

    scripts = dict.fromkeys("abc", partial(reports_of, rounds=ROUNDS))
    found = run_islands(scripts, config(3), hooks={"c": Poison()})
    assert not any(
        "mean of part" in report.cause for reports in found.values() for report in reports
    )
    assert all(
        report.participants == ["a", "b", "c"] for report in found["a"] if report.is_committed
    )


@pytest.mark.parametrize("victims", ["b", "bc"])
def test_a_lying_auditor_costs_no_more_than_any_false_accusation(victims: str) -> None:
    """Whom it accuses misses the round; if that is half of the others or more, it is the liar that
    does.
    """

    def slander(island: Island) -> tuple[list[RoundReport], str]:
        accused, judge = iter(victims * 99), reduce_of(island).attempts._auditor
        assert judge is not None

        async def accuse(plan: Plan, means: object) -> int:
            if len(plan.names) == 4:
                raise AuditError(next(accused), "a lie", is_wrong=True)
            return 0

        judge.run = accuse  # type: ignore[method-assign]
        return reports_of(island, ROUNDS), island.outer.digest

    def honest(island: Island) -> tuple[list[RoundReport], str]:
        return reports_of(island, ROUNDS), island.outer.digest

    found = run_islands(
        {"a": honest, "b": honest, "c": honest, "d": slander}, config(4, audit=0.01)
    )
    reports, digest = found["a"]
    assert [report.round for report in reports if report.is_committed] == list(range(ROUNDS))
    assert digest == found["d"][1]
    assert all(len(report.participants) == 3 for report in reports if report.is_committed)


class TwoFacedReducer(ForwardingTransport):
    """A transport that sends another mean to one island than to the others."""

    def __init__(self, inner: Transport, victim: str) -> None:
        super().__init__(inner)
        self._victim = victim

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if tag.leg is Leg.GATHER and to.island == self._victim:
            payload = (payload.view(torch.float32) * 2).view(torch.uint8)
        await super().send(to, tag, payload)


def test_a_reducer_that_tells_one_island_something_else_does_not_drive_it_out() -> None:
    """Without audits it is the victim that differs from the majority, and that stops after three
    times.
    """
    barrier = threading.Barrier(3)
    scripts = dict.fromkeys("abc", partial(in_step, rounds=6, barrier=barrier))
    two_faced = {"c": lambda hub, inner: TwoFacedReducer(inner, "a")}
    found = run_islands(scripts, config(3, audit=1e-9), faults=two_faced)
    causes = [report.cause for report in found["b"] if not report.is_committed]
    assert "its digest" in causes[0]
    assert any("that island 'c' sent is not the one in its statement" in cause for cause in causes)
    assert [report.participants for report in found["b"] if report.is_committed][2:] == [
        ["a", "b"]
    ] * 4


def test_kept_payloads_are_freed_by_a_commit_and_by_an_abort() -> None:
    def script(island: Island) -> list[int]:
        kept, seen = kept_of(island), []
        release = reduce_of(island).attempts.reducer.release

        def release_and_measure() -> None:
            before = kept.num_bytes
            release()
            seen.append((before, kept.num_bytes))

        reduce_of(island).attempts.reducer.release = release_and_measure  # type: ignore[method-assign]
        island.outer.begin()
        reports = [island.round() for _ in range(ROUNDS)]
        assert reports[-1].is_committed
        return seen

    found = run_islands(dict.fromkeys("ab", script), config(2), faults={"b": fails_in(1)})
    size = sum(values.numel() * 4 for values in tensors().values())
    assert all(after == 0 for seen in found.values() for _, after in seen)
    # Of each part its reducer keeps the payloads of both.
    assert sum(seen[0][0] for seen in found.values()) == 2 * size


def test_with_no_audits_nothing_is_kept_or_served() -> None:
    def script(island: Island) -> bool:
        reports_of(island, 1)
        attempts = reduce_of(island).attempts
        return attempts._auditor is None and attempts.reducer._rank.kept is None

    assert run_islands(dict.fromkeys("ab", script), config(2, audit=0.0)) == {"a": True, "b": True}


def test_the_predicted_bytes_are_those_that_audits_send() -> None:
    def script(island: Island) -> int:
        return sum(report.bytes_sent for report in reports_of(island, ROUNDS))

    model = partial(tensors, scale=400)
    specs = tuple(Spec(name, tuple(values.shape)) for name, values in model().items())
    for probability in (0.0, 1.0):
        sent = run_islands(dict.fromkeys("abc", script), config(3, audit=probability), model=model)
        (predicted,) = round_bytes(config(3, audit=probability), specs, 3)
        assert sum(sent.values()) == pytest.approx(3 * ROUNDS * predicted.sent_bytes, rel=0.03)
