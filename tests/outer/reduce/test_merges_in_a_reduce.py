"""The reduce with merge rules and filters, and payloads that must not enter a mean."""

import asyncio
import math
import re
import struct
from collections.abc import Mapping, Sequence

import pytest
import torch

from outer.agreement.messages import Plan, Ready
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import MergeConfig
from outer.errors import PoisonError
from outer.hooks import NoHooks
from outer.merges import build_merge
from outer.merges.base import weights_of
from outer.network.endpoints import Endpoint
from outer.reduce.payloads import Mean
from outer.reduce.reducer import Reducer
from outer.space.layout import Space
from outer.transports.loopback import Hub, LoopbackTransport
from tests.outer.islands import Spec
from tests.outer.signers import public_of

torch.set_num_threads(1)

GUARD_SECONDS = 30.0
SPECS = [Spec("embed", (100,)), Spec("layers.0.wq", (60,))]
SPACE = Space(SPECS, part_elements=10)
NUM_PARTS = len(SPACE.parts)
Means = dict[int, Mean]


class Payloads(NoHooks):
    """Sends `payload` in place of every payload of its size; each test has one such size."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        bad = torch.frombuffer(bytearray(self._payload), dtype=torch.uint8)
        return bad if bad.numel() == payload.numel() else payload


class Scaled(NoHooks):
    """Sends its pseudo-gradient times `factor`."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        return values * self._factor


class Islands:
    """Islands of one rank on one event loop, which reduce one round after another."""

    def __init__(
        self,
        names: str,
        config: MergeConfig,
        codec: str = "fp32",
        hooks: Mapping[str, NoHooks] | None = None,
        space: Space = SPACE,
    ) -> None:
        hub, hooks = Hub(), hooks or {}
        self.names, self.space = names, space
        self.transports = {
            n: LoopbackTransport(hub, "run", Endpoint(n, 0), GUARD_SECONDS) for n in names
        }
        codecs = build_uniform_choice(build_codec(codec))
        self.reducers = {
            n: Reducer(t, codecs, space, Endpoint(n, 0), hooks.get(n, NoHooks()), config)
            for n, t in self.transports.items()
        }

    async def reduce(
        self,
        pseudo_grads: Mapping[str, Mapping[int, torch.Tensor]],
        round_number: int = 0,
        tokens: Sequence[int] = (),
    ) -> dict[str, Means]:
        """The means that each island gets. Raises the first error of any island."""
        shares = tokens or [1] * len(self.names)
        ready = [
            self._ready(n, round_number, count) for n, count in zip(self.names, shares, strict=True)
        ]
        plan = Plan(round=round_number, attempt=0, planner=self.names[0], participants=ready)
        async with asyncio.timeout(GUARD_SECONDS):
            await asyncio.gather(
                *(self.transports[n].connect(str(round_number), plan.addresses) for n in self.names)
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = {
                        n: tasks.create_task(self.reducers[n].run(plan, pseudo_grads[n]))
                        for n in self.names
                    }
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
        return {name: task.result() for name, task in running.items()}

    def _ready(self, name: str, round_number: int, tokens: int) -> Ready:
        return Ready(
            island=name,
            incarnation="00000000",
            key=public_of(name),
            round=round_number,
            attempt=0,
            tokens=tokens,
            weight=tokens,
            base_tokens=0,
            digest="0" * 32,
            carriers=[(0, len(self.space.parts))],
            transport_addresses=[self.transports[name].address],
            control_addresses=["control"],
        )


def grads(islands: Islands, seed: int = 0) -> dict[str, dict[int, torch.Tensor]]:
    """Pseudo-gradients of each island, by part: a common component and one of its own."""
    generator = torch.Generator().manual_seed(seed)
    common = {
        part.index: torch.randn(part.num_elements, generator=generator)
        for part in islands.space.parts
    }
    return {
        name: {
            i: values + 0.5 * torch.randn(values.shape, generator=generator)
            for i, values in common.items()
        }
        for name in islands.names
    }


def means_of(results: Mapping[str, Means]) -> Means:
    """The means, which are equal on all islands."""
    found = list(results.values())
    for other in found[1:]:
        assert all(torch.equal(other[i].values, found[0][i].values) for i in found[0])
        assert all(torch.equal(other[i].payload, found[0][i].payload) for i in found[0])
    return found[0]


@pytest.mark.parametrize(
    "rule", ["mean", "trimmed_mean", "geometric_median", "centered_clip", "radial"]
)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_every_island_gets_what_the_rule_makes_of_the_decoded_parts(rule: str, codec: str) -> None:
    config = MergeConfig(rule=rule)  # type: ignore[arg-type]
    tokens = [5, 1, 3, 2]

    async def reduce() -> None:
        islands, coder = Islands("abcd", config, codec), build_codec(codec)
        given = grads(islands)
        means = means_of(await islands.reduce(given, tokens=tokens))
        for part in islands.space.parts:
            decoded = [
                coder.decode(coder.encode(given[name][part.index]), part.num_elements)
                for name in islands.names
            ]
            expected = coder.encode(build_merge(config)(decoded, weights_of(tokens), None))
            assert torch.equal(means[part.index].values, coder.decode(expected, part.num_elements))

    asyncio.run(reduce())


def test_centered_clipping_starts_at_what_the_round_before_committed() -> None:
    config = MergeConfig(rule="centered_clip")

    async def reduce() -> None:
        islands = Islands("abc", config)
        first, second = grads(islands, 0), grads(islands, 1)
        last = means_of(await islands.reduce(first, 0))
        for name in islands.names:
            islands.reducers[name].commit(0, last)
        means = means_of(await islands.reduce(second, 1))
        for part in range(NUM_PARTS):
            parts, weights = [second[name][part] for name in islands.names], weights_of([1, 1, 1])
            assert torch.equal(
                means[part].values, build_merge(config)(parts, weights, last[part].values)
            )
            assert not torch.equal(means[part].values, build_merge(config)(parts, weights, None))

    asyncio.run(reduce())


def test_an_island_that_missed_a_commit_starts_afresh() -> None:
    config = MergeConfig(rule="centered_clip")

    async def reduce() -> None:
        islands = Islands("abc", config)
        given = grads(islands)
        fresh = means_of(await islands.reduce(given, 5))
        islands.reducers["a"].commit(3, means_of(await islands.reduce(grads(islands, 1), 3)))
        again = means_of(await islands.reduce(given, 5))
        assert all(torch.equal(again[part].values, fresh[part].values) for part in range(NUM_PARTS))

    asyncio.run(reduce())


def test_a_part_that_fails_a_filter_is_left_out_and_counted() -> None:
    async def reduce() -> None:
        islands = Islands("abcd", MergeConfig(max_norm_ratio=5.0), hooks={"c": Scaled(-10.0)})
        given = grads(islands)
        means = means_of(await islands.reduce(given, tokens=[1, 2, 3, 4]))
        for part in range(NUM_PARTS):
            honest = [given[name][part] for name in "abd"]
            assert torch.equal(
                means[part].values, build_merge(MergeConfig())(honest, weights_of([1, 2, 4]), None)
            )
        counts = [islands.reducers[name].filtered for name in "abcd"]
        assert all(set(count) <= {"c"} for count in counts)
        assert sum(count.get("c", 0) for count in counts) == NUM_PARTS

    asyncio.run(reduce())


def test_what_was_left_out_is_counted_for_one_attempt() -> None:
    async def reduce() -> None:
        islands = Islands("abc", MergeConfig(max_norm_ratio=5.0))
        given = grads(islands)
        await islands.reduce(
            given | {"c": {i: values * 100 for i, values in given["c"].items()}}, 0
        )
        assert any(reducer.filtered for reducer in islands.reducers.values())
        await islands.reduce(given, 1)
        assert not any(reducer.filtered for reducer in islands.reducers.values())

    asyncio.run(reduce())


# -- what may not enter a mean ---------------------------------------------------------------------

ELEMENTS = 160
WHOLE = Space(SPECS, ELEMENTS, block_elements=ELEMENTS)
"""A model of one part, which `a` reduces."""


def fp32(value: float) -> bytes:
    return struct.pack("<f", 1.0) * (ELEMENTS - 1) + struct.pack("<f", value)


def bf16(value: float) -> bytes:
    return b"".join(fp32(value)[at + 2 : at + 4] for at in range(0, 4 * ELEMENTS, 4))


def fp16(value: float, scale: float = 1.0) -> bytes:
    return (
        struct.pack("<f", scale)
        + struct.pack("<e", 1.0) * (ELEMENTS - 1)
        + struct.pack("<e", value)
    )


def int8(scale: float) -> bytes:
    return struct.pack("<f", scale) + bytes([127]) * ELEMENTS


BAD = {
    "fp32 nan": ("fp32", fp32(math.nan), "nan"),
    "fp32 inf": ("fp32", fp32(math.inf), "inf"),
    "bf16 nan": ("bf16", bf16(math.nan), "nan"),
    "bf16 -inf": ("bf16", bf16(-math.inf), "-inf"),
    "fp16 nan": ("fp16", fp16(math.nan), "nan"),
    "fp16 inf": ("fp16", fp16(math.inf), "inf"),
    "fp16 scale of inf": ("fp16", fp16(1.0, math.inf), "inf"),
    "fp16 scale of nan": ("fp16", fp16(1.0, math.nan), "nan"),
    "fp16 overflow by the scale": ("fp16", fp16(8.0, 2.0**127), "inf"),
    "fp16 negative scale": ("fp16", fp16(1.0, -1.0), "-1.0"),
    "int8 scale of nan": ("int8", int8(math.nan), "nan"),
    "int8 scale of inf": ("int8", int8(math.inf), "inf"),
    "int8 huge scale": ("int8", int8(3.0e38), "e[+]38"),
    "int8 negative scale": ("int8", int8(-1.0), "-1.0"),
}


def poison_of(
    codec: str, hooks: Mapping[str, NoHooks], element: float = 1.0, tokens: Sequence[int] = ()
) -> PoisonError:
    """The error of a reduce of three islands in which the others' last element is `element`."""

    async def reduce() -> None:
        islands = Islands("abc", MergeConfig(), codec, hooks, WHOLE)
        given = grads(islands)
        for parts in given.values():
            parts[0][-1] = element
        await islands.reduce(given, tokens=tokens)

    with pytest.raises(PoisonError) as caught:
        asyncio.run(reduce())
    return caught.value


@pytest.mark.parametrize("case", BAD)
def test_a_payload_that_is_not_finite_is_refused_by_island_parameter_and_value(case: str) -> None:
    codec, payload, value = BAD[case]
    error = poison_of(codec, {"b": Payloads(payload)})
    assert error.peer == "b"
    assert re.search(rf"island 'b' sent .*'embed' to 'layers.0.wq'.*{value}", str(error))


def test_a_mean_that_is_not_finite_is_refused_by_the_name_of_its_reducer() -> None:
    assert poison_of("fp32", {"a": Payloads(fp32(math.nan))}).peer == "a"


def test_finite_values_that_make_the_mean_overflow_are_refused_by_the_largest_of_them() -> None:
    # These three shares, rounded to fp32, are together a little more than one.
    largest = torch.finfo(torch.float32).max
    almost = torch.nextafter(torch.tensor(largest), torch.tensor(0.0)).item()
    error = poison_of("fp32", {"b": Payloads(fp32(largest))}, element=almost, tokens=[2, 5, 4])
    assert error.peer == "b"
    assert "for 'layers.0.wq', which makes the mean inf" in str(error)


def test_an_island_whose_payload_was_refused_can_be_left_out() -> None:
    async def reduce() -> None:
        islands = Islands("abc", MergeConfig(), "fp32", {"b": Payloads(fp32(math.nan))}, WHOLE)
        given = grads(islands)
        with pytest.raises(PoisonError) as caught:
            await islands.reduce(given, 0)
        islands.names = islands.names.replace(caught.value.peer, "")
        expected = build_merge(MergeConfig())([given["a"][0], given["c"][0]], [0.5, 0.5], None)
        assert torch.equal(means_of(await islands.reduce(given, 1))[0].values, expected)

    asyncio.run(reduce())
