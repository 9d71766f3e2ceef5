"""The stand-in has the payloads of the run's own model."""

import pytest

from diloco.virtual.stand_in import MAX_WHOLE, SHARERS, build_stand_in
from inner.param_spec import ParamSpec
from outer.codecs.choice import build_space
from outer.config import OuterConfig
from outer.cost import round_bytes
from outer.network.endpoints import Leg
from outer.network.frames import HEADER_BYTES

SPECS = [
    ParamSpec("embed.weight", (256, 64)),
    *(ParamSpec(f"layers.{layer}.wq", (64, 300)) for layer in range(6)),
    *(ParamSpec(f"layers.{layer}.norm", (64,)) for layer in range(6)),
    ParamSpec("head.weight", (256, 64)),
]
SPECS.sort(key=lambda spec: (spec.name != "embed.weight", spec.name.startswith("head"), spec.name))


def outer(**changes: object) -> OuterConfig:
    return OuterConfig(**{"part_elements": 4096, "inner_steps": 8, **changes})


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("fragments", [1, 4])
def test_a_round_sends_the_bytes_of_the_real_parts(codec: str, fragments: int) -> None:
    config, num_islands = outer(codec=codec, fragments=fragments), 4
    stand_in = build_stand_in(SPECS, config, num_islands)
    small, real = build_space(stand_in.specs, stand_in.config), build_space(SPECS, config)
    for fragment, expected in enumerate(round_bytes(config, tuple(SPECS), num_islands)):
        parts = [part.index for part in small.parts if part.fragment == fragment]
        num_real = sum(part.fragment == fragment for part in real.parts)
        # A part goes to its reducer from all others, and its mean from there to all others.
        sent = (num_islands - 1) * sum(stand_in.sizes[leg][part] for leg in Leg for part in parts)
        headers = 2 * (num_islands - 1) * num_real * HEADER_BYTES
        assert sent == pytest.approx(num_islands * expected.sent_bytes + headers, rel=0.01)


def test_many_parts_are_dealt_to_few_payloads_evenly() -> None:
    specs = [ParamSpec("w", (1024, 1024))]
    stand_in = build_stand_in(specs, outer(codec="fp32", part_elements=1024), num_islands=8)
    assert len(stand_in.sizes[Leg.REDUCE]) == 32
    assert set(stand_in.sizes[Leg.REDUCE]) == {32 * (4 * 1024 + HEADER_BYTES)}


def test_a_fragment_of_the_model_is_one_of_the_stand_in() -> None:
    config = outer(fragments=4, fragment_pattern="strided")
    stand_in = build_stand_in(SPECS, config, num_islands=2)
    assert build_space(stand_in.specs, stand_in.config).num_fragments == 4


def test_among_very_many_islands_some_reduce_for_all_and_the_bytes_stay() -> None:
    specs, config = [ParamSpec("w", (1024, 1024))], outer(codec="fp32", part_elements=1024)
    whole, shared = (
        build_stand_in(specs, config, MAX_WHOLE),
        build_stand_in(specs, config, 2 * MAX_WHOLE),
    )
    assert whole.share == 1.0 and shared.share == SHARERS / (2 * MAX_WHOLE)
    assert len(shared.sizes[Leg.REDUCE]) == SHARERS
    assert sum(shared.sizes[Leg.REDUCE]) == sum(whole.sizes[Leg.REDUCE])
