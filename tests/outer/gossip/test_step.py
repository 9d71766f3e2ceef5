"""Gossip: the groups of a round, the maths of an outer step, and islands that average with a few
others.
"""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
import torch

from outer.codecs.choice import build_codec_choice
from outer.config import GossipConfig, OuterConfig
from outer.errors import MessageError
from outer.gossip.averager import GossipAverager
from outer.gossip.server import GossipServer, MeetReply, PublishedShare, TellReply
from outer.gossip.shares import ShareCoding
from outer.gossip.step import Share, build_optimizer_config, groups_of_round, outer_gradient
from outer.membership.loopback import LoopbackMessenger
from outer.network.deadlines import FLOORS, MAX_FIRST_SECONDS, MAX_SECONDS
from outer.network.endpoints import Endpoint, Messenger
from outer.network.messages import parse
from outer.report import CaughtUp, RoundReport
from outer.space.layout import Space
from outer.state.optimizer import OuterOptimizer
from outer.transports.loopback import Hub
from tests.outer.islands import (
    GUARD_SECONDS,
    Island,
    Spec,
    as_matrix,
    progress,
    run_islands,
    tensors,
)

torch.set_num_threads(1)


# -- groups and maths ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_islands", "size"), [(1, 2), (2, 2), (3, 2), (5, 2), (7, 3), (16, 2), (16, 4), (17, 16)]
)
def test_groups_have_every_island_once_and_nobody_alone(num_islands: int, size: int) -> None:
    names = [f"island-{i}" for i in range(num_islands)]
    for number in range(50):
        groups = groups_of_round(7, number, names, size)
        assert sorted(name for group in groups for name in group) == sorted(names)
        assert min(map(len, groups)) >= min(size, num_islands) and max(map(len, groups)) < 2 * size
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert all(group == sorted(group) for group in groups)


def test_groups_follow_from_seed_round_and_names_alone() -> None:
    names = [f"island-{i}" for i in range(8)]
    assert groups_of_round(0, 0, names, 2) == groups_of_round(0, 0, names[::-1], 2)
    partners = {tuple(groups_of_round(0, number, names, 2)[0]) for number in range(200)}
    assert len(partners) == 28, "every pair comes"
    drawn = {str(groups_of_round(seed, 0, names, 2)) for seed in range(20)}
    assert len(drawn) > 15


def step_together(
    params: list[torch.Tensor], momenta: list, grads: list[torch.Tensor], group: list[int], c
) -> None:
    """One outer step of the islands in `group`, in place."""
    shares = {i: Share(grads[i], params[i].clone()) for i in group}
    for i in group:
        gradient = outer_gradient([shares[j] for j in sorted(group)], shares[i], c)
        momenta[i].step({0: gradient})


def optimizers(params: list[torch.Tensor], c: GossipConfig) -> list[OuterOptimizer]:
    return [OuterOptimizer({0: values}, build_optimizer_config(c)) for values in params]


@pytest.mark.parametrize("num_islands", [4, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_without_progress_islands_come_together_fifty_times_in_ten_rounds(num_islands: int) -> None:
    config, size, seeds = GossipConfig(), 200, range(5)
    names = [f"{i:03}" for i in range(num_islands)]
    left = 0.0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        params = [torch.randn(size, generator=generator) for _ in names]
        before, mean = torch.stack(params).var(0).mean(), torch.stack(params).double().mean(0)
        held, zero = optimizers(params, config), [torch.zeros(size)] * num_islands
        for number in range(10):
            for group in groups_of_round(seed, number, names, config.group):
                step_together(params, held, zero, [int(name) for name in group], config)
        left += (torch.stack(params).var(0).mean() / before).item() / len(seeds)
        torch.testing.assert_close(torch.stack(params).double().mean(0), mean, rtol=0, atol=1e-5)
    assert left <= 1 / 50


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_pulled_sums_to_zero_over_a_group(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    shares = [Share(torch.zeros(1000), torch.randn(1000, generator=generator)) for _ in range(size)]
    pulls = [outer_gradient(shares, own, GossipConfig()).double() for own in shares]
    assert max(pull.abs().max().item() for pull in pulls) > 0.5
    assert torch.stack(pulls).sum(0).abs().max() < 1e-6


def test_a_step_is_the_papers() -> None:
    config = GossipConfig(momentum=0.3, lr=0.6, pull=0.9)
    generator = torch.Generator().manual_seed(1)
    phi, theta = ([torch.randn(50, generator=generator) for _ in range(3)] for _ in range(2))
    expected, m = [values.double() for values in phi], [torch.zeros(50).double()] * 3
    held = optimizers(phi, config)
    for _ in range(4):
        thetas = [values.double() for values in theta]
        mean_progress = sum(t - p for t, p in zip(thetas, expected, strict=True)) / 3
        mean = sum(expected) / 3
        m = [0.3 * m[i] + 0.6 * mean_progress + 0.9 * (mean - expected[i]) for i in range(3)]
        expected = [expected[i] + m[i] for i in range(3)]
        step_together(phi, held, [phi[i] - theta[i] for i in range(3)], [0, 1, 2], config)
    for found, wanted in zip(phi, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


# -- islands ---------------------------------------------------------------------------------------


def config(num_islands: int, group: int = 2, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "transport": "loopback",
        "wait_seconds": GUARD_SECONDS / 2,
    }
    return OuterConfig(gossip=GossipConfig(group=group), **{**fields, **changes})


def averager_of(island: Island) -> GossipAverager:
    assert isinstance(island.outer.averager, GossipAverager)
    return island.outer.averager


def messenger_of(island: Island) -> Messenger:
    assert island.network is not None
    return island.network.messenger


def break_off(island: Island) -> None:
    """Its connections end, as if its machine had died."""
    messenger = messenger_of(island)
    assert isinstance(messenger, LoopbackMessenger)
    messenger._hub.lose(island.name)


def one_round(island: Island) -> RoundReport:
    island.train(island.outer.position.round)
    island.outer.launch(100)
    return island.outer.land().reports[0]


def rounds(count: int, island: Island, *, finishes: bool = True) -> list[RoundReport]:
    island.outer.begin()
    found = [one_round(island) for _ in range(count)]
    if finishes:
        island.outer.finish()
    return found


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partners that answer late, because the machine is busy, are waited for."""
    monkeypatch.setitem(FLOORS, "call", GUARD_SECONDS)
    monkeypatch.setitem(MAX_SECONDS, "call", GUARD_SECONDS)
    monkeypatch.setitem(MAX_FIRST_SECONDS, "call", GUARD_SECONDS)


@pytest.mark.usefixtures("patience")
def test_a_group_of_all_with_equal_params_is_diloco_with_heavy_ball() -> None:
    def script(island: Island) -> torch.Tensor:
        rounds(5, island)
        return island.params.flat()

    found = run_islands(dict.fromkeys("abcd", script), config(4, group=4))
    matrices = {name: as_matrix(values) for name, values in tensors().items()}
    flat = torch.cat([values.flatten() for values in matrices.values()])
    sgd = torch.optim.SGD([flat], lr=0.7, momentum=0.5)
    for number in range(5):
        steps = [
            torch.cat([progress(n, number, k, v).flatten() for k, v in matrices.items()])
            for n in "abcd"
        ]
        flat.grad = -torch.stack(steps).mean(0)
        sgd.step()
    for name in "abcd":
        assert torch.equal(found[name], found["a"]), "all hold the same bits"
        torch.testing.assert_close(found[name], flat, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
@pytest.mark.usefixtures("patience")
def test_reports_name_the_same_groups_on_every_island(codec: str) -> None:
    names = "abcde"
    reports = run_islands(dict.fromkeys(names, partial(rounds, 4)), config(5, codec=codec))
    for number in range(4):
        groups = {tuple(reports[name][number].participants) for name in names}
        assert sorted(groups) == sorted(
            tuple(g) for g in groups_of_round(0, number, list(names), 2)
        )
        for name in names:
            report = reports[name][number]
            assert (
                name in report.participants
                and report.is_committed
                and report.is_own
                and report.cause == ""
            )
            assert report.bytes_sent > 0 and report.bytes_received > 0


@pytest.mark.usefixtures("patience")
def test_islands_hold_params_of_their_own_and_in_a_group_the_same_progress_counts() -> None:
    def script(island: Island) -> tuple[str, list[RoundReport]]:
        reports = rounds(3, island)
        return island.outer.digest, reports

    found = run_islands(dict.fromkeys("abcd", script), config(4))
    assert len({digest for digest, _ in found.values()}) == 4
    for digest, reports in found.values():
        assert reports[-1].digest == digest


def test_a_death_stops_nobody() -> None:
    gone = threading.Event()
    begun = threading.Barrier(4)

    def dies(island: Island) -> list[RoundReport]:
        island.outer.begin()
        one_round(island)
        begun.wait(GUARD_SECONDS)  # The first round waits for all.
        break_off(island)
        gone.set()
        return []

    def lives(island: Island) -> list[RoundReport]:
        island.outer.begin()
        first = [one_round(island)]
        begun.wait(GUARD_SECONDS)
        assert gone.wait(GUARD_SECONDS)
        return first + [one_round(island) for _ in range(4)]

    found = run_islands({"a": dies, "b": lives, "c": lives, "d": lives}, config(4))
    for name in "bcd":
        assert [report.round for report in found[name]] == list(range(5))
        assert all("a" not in report.participants for report in found[name][1:])
        assert all(report.is_committed for report in found[name])


@pytest.mark.slow
def test_a_partner_that_dies_with_its_share_half_given_is_left_out() -> None:
    class Dies:
        """Goes when its share is asked for in round 1."""

        def __init__(self, island: Island) -> None:
            server = averager_of(island).exchange._server
            self._island, self._take = island, server._on_take
            messenger_of(island).serve("take", self)

        async def __call__(self, source, body: bytes) -> bytes:
            if self._island.outer.position.round == 1 and b'"part":3' in body:
                break_off(self._island)
            return await self._take(source, body)

    def dies(island: Island) -> list[RoundReport]:
        Dies(island)
        return rounds(2, island, finishes=False)

    found = run_islands({"a": dies, "b": partial(rounds, 3)}, config(2))
    b = found["b"]
    assert (
        b[0].participants == ["a", "b"]
        and b[1].participants == ["b"]
        and b[2].participants == ["b"]
    )
    assert "without a" in b[1].cause
    assert found["a"][1].participants == ["a"], (
        "the share that b could not take does not count in a either"
    )


def test_a_joiner_takes_some_islands_params_without_momentum() -> None:
    at_two, joined = threading.Event(), threading.Event()

    def first(island: Island) -> list[RoundReport]:
        island.outer.begin()
        found = [one_round(island) for _ in range(2)]
        at_two.set()
        assert joined.wait(GUARD_SECONDS)
        found += [one_round(island) for _ in range(4)]
        return found

    def late(island: Island) -> tuple[list[bytes], list[RoundReport]]:
        assert at_two.wait(GUARD_SECONDS)
        position = island.outer.begin()
        assert position.round == 2
        state = island.state()
        joined.set()
        return state, [one_round(island) for _ in range(4)]

    scripts: dict[str, Any] = {"a": first, "b": late}
    found: dict[str, Any] = run_islands(scripts, config(1))
    state, reports = found["b"]
    for body in state:
        values = torch.frombuffer(bytearray(body.partition(b"\n")[2]), dtype=torch.float32)
        assert values[: values.numel() // 2].any() and not values[values.numel() // 2 :].any()
    assert [report.round for report in reports] == [2, 3, 4, 5]
    assert reports[0].participants == ["b"], "its first round it makes alone"
    assert [r.participants for r in reports[1:]] == [["a", "b"]] * 3
    assert [r.participants for r in found["a"][3:]] == [["a", "b"]] * 3


@pytest.mark.slow
def test_an_island_rounds_behind_goes_on_from_one_that_is_ahead() -> None:
    ahead = threading.Event()

    def fast(island: Island) -> None:
        island.outer.begin()
        # As if it had waited its grace for the other in vain.
        averager_of(island).pace.deadlines.initial_seconds = 0.0
        for _ in range(3):
            one_round(island)
        ahead.set()
        done.wait(GUARD_SECONDS)

    done = threading.Event()

    def slow(island: Island) -> tuple[str, int]:
        island.outer.begin()
        island.train(0)
        assert ahead.wait(GUARD_SECONDS)
        island.outer.launch(100)
        try:
            island.outer.land()
        except CaughtUp as caught:
            return str(caught), island.outer.position.round
        finally:
            done.set()
        return "", 0

    scripts: dict[str, Any] = {"a": fast, "b": slow}
    cause, number = run_islands(scripts, config(2))["b"]
    assert "have gone on" in cause and number == 3


# -- hostile bytes ---------------------------------------------------------------------------------


def test_a_share_of_another_size_or_not_finite_is_refused() -> None:
    space = Space([Spec("w", (8, 8))], 1024)
    gossiping = config(2)
    assert gossiping.gossip is not None
    coding = ShareCoding(space, build_codec_choice(gossiping), gossiping.gossip.params)
    num_elements = space.parts[0].num_elements
    share = Share(torch.ones(num_elements), torch.full((num_elements,), 2.0))
    payload = coding.encode(0, share)
    assert torch.equal(coding.decode(0, payload).params, share.params)
    for bad in (payload[:-1], torch.cat([payload, payload[:4]]), payload[:0]):
        with pytest.raises(MessageError):
            coding.decode(0, bad)
    payload[-4:] = torch.tensor([float("nan")]).view(torch.uint8)
    with pytest.raises(MessageError):
        coding.decode(0, payload)


def test_a_stranger_gets_nothing_and_changes_nothing() -> None:
    async def ask() -> None:
        server = GossipServer(LoopbackMessenger(Hub(), "run", Endpoint("a", 0)), [0, 0])
        await server.publish(
            PublishedShare(3, frozenset({"b"}), {0: torch.ones(4, dtype=torch.uint8)})
        )
        partner, stranger = Endpoint("b", 0), Endpoint("c", 0)
        assert await server._on_take(partner, b'{"round":3,"part":0}') == bytes([1, 1, 1, 1])
        for source, body in [
            (stranger, b'{"round":3,"part":0}'),
            (partner, b'{"round":3,"part":1}'),
            (partner, b'{"round":3,"part":-1}'),
            (partner, b'{"round":3}'),
            (partner, b"\x80\x04."),
        ]:
            with pytest.raises(MessageError):
                await server._on_take(source, body)
        assert parse(MeetReply, await server._on_meet(stranger, b'{"round":3}')).status == "apart"
        assert parse(MeetReply, await server._on_meet(partner, b'{"round":2}')).status == "past"
        assert (
            parse(TellReply, await server._on_tell(stranger, b'{"round":3,"has_all":true}')).status
            == "no"
        )
        assert (
            parse(TellReply, await server._on_tell(partner, b'{"round":2,"has_all":true}')).status
            == "no"
        )
        assert server.theirs == {}

    asyncio.run(ask())


def test_a_partner_with_another_round_or_none_of_the_parts_is_left_out() -> None:
    """b's desk answers with what does not fit; a goes on alone, and says why."""

    class Answers:
        def __init__(self, island: Island, kind: str, reply: bytes) -> None:
            messenger_of(island).serve(kind, self)
            self._reply = reply

        async def __call__(self, source: Endpoint, body: bytes) -> bytes:
            return self._reply

    def bad(kind: str, reply: bytes, island: Island) -> list[RoundReport]:
        Answers(island, kind, reply)
        return rounds(1, island)

    carriers = MeetReply(status="here", round=0, carriers=[(0, 1)]).model_dump_json().encode()
    for kind, reply in [("take", b"x" * 40), ("meet", carriers), ("meet", b"{}")]:
        found = run_islands({"a": partial(rounds, 1), "b": partial(bad, kind, reply)}, config(2))
        assert found["a"][0].participants == ["a"] and found["b"][0].participants == ["b"], (
            kind,
            reply,
        )
        assert found["a"][0].cause.startswith("without b: ")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("fragments", {"fragments": 2}),
        ("delay", {"delay": 1}),
        ("moments", {"moments": [1, 1]}),
        ("quorum", {"quorum": 2}),
        ("local_steps", {"local_steps": "dynamic"}),
        ("merge", {"merge": {"rule": "radial"}}),
        ("optimizer", {"optimizer": {"lr": 1.0}}),
        ("coding.feedback", {"coding": {"feedback": 0.9}}),
    ],
)
def test_settings_of_rounds_that_all_make_are_refused(key: str, changes: dict) -> None:
    with pytest.raises(ValueError, match=f"leave out {key}, or set gossip to null"):
        config(2, **changes)
