"""The all-to-all reduce: every element enters once, and results are bit-equal for any order of
messages.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.agreement.messages import Plan, Ready
from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.choice import build_uniform_choice
from outer.errors import OuterError
from outer.network.endpoints import Endpoint, Tag
from outer.network.frames import HEADER_BYTES
from outer.network.messages import pack_carriers
from outer.reduce.assignment import Assignment
from outer.reduce.payloads import Mean
from outer.reduce.reducer import PARTS_IN_FLIGHT, Reducer
from outer.space.digest import part_digest
from outer.space.layout import Space
from outer.transports.loopback import Hub, LoopbackTransport, Parcel
from tests.outer.islands import Spec
from tests.outer.signers import public_of

torch.set_num_threads(1)

GUARD_SECONDS = 30.0


@dataclass(frozen=True)
class Case:
    """One reduce: the model, the participants with their carriers and tokens, and the order of
    messages.
    """

    space: Space
    codec: Codec
    carriers: dict[str, list[int]]
    tokens: dict[str, int]
    seed: int
    links: dict[str, int] = field(default_factory=dict)
    """Rates in kbit/s, of islands that say theirs."""

    @property
    def names(self) -> list[str]:
        return sorted(self.carriers)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(name, rank)
            for name in self.names
            for rank in range(max(self.carriers[name]) + 1)
        ]

    def pseudo_grad(self, island: str, part: int) -> torch.Tensor:
        rng = np.random.default_rng([self.seed, self.names.index(island), part])
        values = rng.standard_normal(self.space.parts[part].num_elements) * 10.0 ** rng.integers(
            -4, 3
        )
        return torch.from_numpy(values.astype(np.float32))

    def carried(self, at: Endpoint) -> dict[int, torch.Tensor]:
        parts = [i for i, rank in enumerate(self.carriers[at.island]) if rank == at.rank]
        return {part: self.pseudo_grad(at.island, part) for part in parts}

    def plan(self) -> Plan:
        participants = []
        for name in self.names:
            addresses = [str(e) for e in self.endpoints if e.island == name]
            participants.append(
                Ready(
                    island=name,
                    incarnation="00000000",
                    key=public_of(name),
                    round=0,
                    attempt=0,
                    base_tokens=0,
                    tokens=self.tokens[name],
                    weight=self.tokens[name],
                    digest="0" * 32,
                    link_kbit=self.links.get(name, 0),
                    carriers=pack_carriers(self.carriers[name]),
                    transport_addresses=addresses,
                    control_addresses=addresses,
                )
            )
        return Plan(round=0, attempt=0, planner=self.names[0], participants=participants)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any))
    codec = build_codec(draw(st.sampled_from(["fp32", "int8"])))
    specs = [Spec(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    space = Space(specs, draw(st.integers(1, 200)), codec.block_elements)
    islands = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 1 << 20))
    rng = random.Random(seed)
    ranks = {f"i{k}": draw(st.integers(1, 3)) for k in range(islands)}
    carriers = {name: [rng.randrange(n) for _ in space.parts] for name, n in ranks.items()}
    tokens = {name: draw(st.sampled_from([0, 1, 7, 1000])) for name in ranks}
    links = {name: draw(st.integers(1, 1000)) for name in ranks} if draw(st.booleans()) else {}
    return Case(space, codec, carriers, tokens, seed, links)


class Shuffler:
    """Delivers messages in random order, each some turns of the event loop later."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._held: list[Callable[[], None]] = []

    def __call__(self, parcel: Parcel, deliver: Callable[[], None]) -> None:
        self._held.append(deliver)
        self._later(self._rng.randrange(40))

    def _later(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._later, turns - 1)
        else:
            # One message is let go for each that was sent, not the same one.
            self._held.pop(self._rng.randrange(len(self._held)))()


Outcome = tuple[dict[Endpoint, dict[int, Mean]], dict[str, int]]


async def reduce_on_all(case: Case) -> Outcome:
    """Every endpoint's means, and the bytes that each island sent."""
    hub = Hub(Shuffler(case.seed))
    transports = {e: LoopbackTransport(hub, "run", e, GUARD_SECONDS) for e in case.endpoints}
    plan = case.plan()
    async with asyncio.timeout(GUARD_SECONDS):
        await asyncio.gather(*(t.connect("0", plan.addresses) for t in transports.values()))
        reducers = [
            Reducer(t, build_uniform_choice(case.codec), case.space, e)
            for e, t in transports.items()
        ]
        work = (r.run(plan, case.carried(e)) for r, e in zip(reducers, transports, strict=True))
        means = await asyncio.gather(*work)
    sent = {
        name: sum(t.traffic.bytes_sent for e, t in transports.items() if e.island == name)
        for name in case.names
    }
    await asyncio.gather(*(t.close() for t in transports.values()))
    return dict(zip(transports, means, strict=True)), sent


def run(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    return asyncio.run(work)


def reference(case: Case, part: int) -> torch.Tensor:
    """The expected mean, computed in one loop."""
    total, codec = sum(case.tokens.values()), case.codec
    result = torch.zeros(case.space.parts[part].num_elements)
    for name in case.names:
        weight = case.tokens[name] / total if total else 1 / len(case.names)
        values = codec.decode(codec.encode(case.pseudo_grad(name, part)), result.numel())
        result = result + values * torch.tensor(weight, dtype=torch.float32)
    return codec.decode(codec.encode(result), result.numel())


def exact_mean(case: Case, part: int) -> torch.Tensor:
    """The mean in fp64, without a codec."""
    tokens = torch.tensor([case.tokens[name] for name in case.names], dtype=torch.float64)
    weights = tokens / tokens.sum() if tokens.sum() else torch.full_like(tokens, 1 / len(tokens))
    return sum(
        w * case.pseudo_grad(name, part).double()
        for w, name in zip(weights, case.names, strict=True)
    )


def bytes_of(case: Case, island: str) -> int:
    """Expected bytes: a reducer sends the mean to all others, which send their part to the
    reducer.
    """
    total, assignment = 0, Assignment(case.plan())
    for part in case.space.parts:
        is_reducer = assignment.reducer_of(part.index) == island
        messages = len(case.names) - 1 if is_reducer else 1
        total += messages * (case.codec.num_bytes(part.num_elements) + HEADER_BYTES)
    return total


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_every_element_is_reduced_exactly_once_whatever_the_order_of_messages(case: Case) -> None:
    means, sent = run(reduce_on_all(case))
    for name in case.names:
        by_part: dict[int, Mean] = {}
        for endpoint in case.endpoints:
            if endpoint.island == name:
                assert not by_part.keys() & means[endpoint].keys(), "a part came out on two ranks"
                by_part |= means[endpoint]
        assert sorted(by_part) == [part.index for part in case.space.parts]
        for index, mean in by_part.items():
            assert torch.equal(mean.values, reference(case, index)), f"island {name}, part {index}"
    assert sent == {name: bytes_of(case, name) for name in case.names}


@given(case=cases())
@settings(max_examples=10, deadline=None)
def test_all_islands_get_equal_bytes_of_every_part(case: Case) -> None:
    means, _ = run(reduce_on_all(case))
    payloads: dict[int, set[bytes]] = {}
    for by_part in means.values():
        for index, mean in by_part.items():
            payloads.setdefault(index, set()).add(mean.payload.numpy().tobytes())
    assert all(len(found) == 1 for found in payloads.values())


def fixed_case(codec: str, num_elements: int, carriers: dict[str, int], **changes: Any) -> Case:
    space = Space([Spec("w", (num_elements,))], 256, build_codec(codec).block_elements)
    ranks = {name: [i % n for i in range(len(space.parts))] for name, n in carriers.items()}
    fields = {"carriers": ranks, "tokens": dict.fromkeys(carriers, 5), "seed": 3, **changes}
    return Case(space=space, codec=build_codec(codec), **fields)


@pytest.mark.parametrize(
    ("codec", "tolerance"), [("fp32", 1e-6), ("bf16", 2.0**-7), ("int8", 2 / 127)]
)
def test_the_result_is_the_mean_weighted_by_tokens(codec: str, tolerance: float) -> None:
    case = fixed_case(codec, 3000, {"a": 1, "b": 2, "c": 3}, tokens={"a": 100, "b": 300, "c": 50})
    means, _ = run(reduce_on_all(case))
    for index, mean in means[Endpoint("a", 0)].items():
        largest = max(float(case.pseudo_grad(name, index).abs().max()) for name in case.names)
        error = (mean.values.double() - exact_mean(case, index)).abs().max()
        assert float(error) <= tolerance * largest


def test_an_island_with_a_slow_link_sends_little_more_than_its_own_pseudo_gradient() -> None:
    links = {"a": 100, "b": 100, "c": 100, "d": 20}
    case = fixed_case("fp32", 256 * 300, dict.fromkeys("abcd", 1), links=links)
    _, sent = run(reduce_on_all(case))
    model, fast = 300 * (case.codec.num_bytes(256) + HEADER_BYTES), 5 / 3
    assert sent == {
        name: pytest.approx(model * share, rel=0.02)
        for name, share in zip("abcd", [fast] * 3 + [1], strict=True)
    }


def test_an_islands_own_part_is_coded_too() -> None:
    case = fixed_case("int8", 2000, {"a": 1})
    means, sent = run(reduce_on_all(case))
    assert sent == {"a": 0}
    for index, mean in means[Endpoint("a", 0)].items():
        assert not torch.equal(mean.values, case.pseudo_grad("a", index))
        assert torch.equal(mean.values, reference(case, index))


def test_many_more_parts_than_are_in_flight_do_not_block_each_other() -> None:
    # Ranks that carry nothing in common with their peers' ranks: every rank waits for several.
    num_parts = 6 * PARTS_IN_FLIGHT
    space = Space([Spec("w", (num_parts,))], 1)
    runs = {"a": [0] * num_parts, "b": [0] * (num_parts // 2) + [1] * (num_parts // 2)}
    stripes = {
        "c": [i % 3 for i in range(num_parts)],
        "d": [(num_parts - i) % 2 for i in range(num_parts)],
    }
    case = Case(space, build_codec("fp32"), runs | stripes, dict.fromkeys("abcd", 1), seed=5)
    means, _ = run(reduce_on_all(case))
    for endpoint, by_part in means.items():
        assert all(torch.equal(mean.values, reference(case, i)) for i, mean in by_part.items()), (
            endpoint
        )


def test_a_non_finite_pseudo_gradient_is_refused_by_its_parameters_name() -> None:
    space = Space([Spec("embed", (300,)), Spec("layers.0.wq", (20, 20)), Spec("head", (300,))], 128)
    values = {part.index: torch.zeros(part.num_elements) for part in space.parts}
    part = next(p for p in space.parts if p.start <= 500 < p.stop)
    values[part.index][500 - part.start] = torch.nan

    async def reduce_alone() -> None:
        case = Case(space, build_codec("fp32"), {"a": [0] * len(space.parts)}, {"a": 1}, 0)
        transport = LoopbackTransport(Hub(), "run", Endpoint("a", 0), GUARD_SECONDS)
        await Reducer(transport, build_uniform_choice(case.codec), space, Endpoint("a", 0)).run(
            case.plan(), values
        )

    with pytest.raises(OuterError, match=r"'layers.0.wq' holds nan"):
        asyncio.run(reduce_alone())


def test_a_part_is_stepped_and_hashed_while_others_still_arrive() -> None:
    case = fixed_case("fp32", 1024, {"a": 1, "b": 1})
    last, hashed = len(case.space.parts) - 1, []

    async def reduce_by_two() -> None:
        are_others_hashed, loop = asyncio.Event(), asyncio.get_running_loop()

        def digest_after(part: int, mean: torch.Tensor, num_given: int) -> bytes:
            hashed.append(part)
            if len(hashed) == last:
                loop.call_soon_threadsafe(are_others_hashed.set)
            return part_digest(mean, torch.tensor([float(num_given)]))

        hub, plan = Hub(), case.plan()
        a, b = (LoopbackTransport(hub, "run", Endpoint(name, 0), GUARD_SECONDS) for name in "ab")
        receive = a.recv

        async def hold_the_last_back(source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
            if tag.part == last:
                await are_others_hashed.wait()
            return await receive(source, tag, num_bytes)

        a.recv = hold_the_last_back  # type: ignore[method-assign]
        async with asyncio.timeout(GUARD_SECONDS):
            await asyncio.gather(a.connect("0", plan.addresses), b.connect("0", plan.addresses))
            (ra, rb), codecs = case.endpoints, build_uniform_choice(case.codec)
            reducers = [Reducer(t, codecs, case.space, e) for t, e in ((a, ra), (b, rb))]
            means, _ = await asyncio.gather(
                reducers[0].run(plan, case.carried(ra), digest_after),
                reducers[1].run(plan, case.carried(rb)),
            )
        assert all(
            m.digest_after == part_digest(m.values, torch.tensor([2.0])) for m in means.values()
        )

    asyncio.run(reduce_by_two())
    assert hashed[-1] == last and sorted(hashed) == list(range(last + 1))
