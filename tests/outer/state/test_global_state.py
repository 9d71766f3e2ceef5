"""The global params and momentum of a rank: stepped whole, handed over whole, checked on
arrival.
"""

from dataclasses import dataclass

import pytest
import torch

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.config import OuterOptimizerConfig
from outer.errors import MessageError
from outer.space.layout import Space
from outer.state.global_state import GlobalState
from outer.state.part_state import STRETCH_ELEMENTS, Position, advance, unpack, unpack_mean

torch.set_num_threads(1)


@dataclass(frozen=True)
class Spec:
    """The one parameter of a model."""

    name: str
    shape: tuple[int, ...]


NUM_ISLANDS = 3
ALIGNED = {"delayed": True, "align": {"keep": 0.9, "turn": 0.7, "shrink": 20.0}}
"""Random pseudo-gradients have small cosines: both cases of the rule occur."""
SPACE = Space([Spec("w", (1030,))], part_elements=256)


def values(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {part.index: torch.randn(part.num_elements, generator=generator) for part in SPACE.parts}


def stepped(num_rounds: int, config: OuterOptimizerConfig | None = None) -> GlobalState:
    """The state after some rounds of random pseudo-gradients."""
    state = GlobalState(values(0), config or OuterOptimizerConfig(), NUM_ISLANDS)
    for number in range(num_rounds):
        state.commit(values(100 + number), Position(round=number + 1, tokens=10 * (number + 1)))
    return state


def test_a_pseudo_gradient_is_global_minus_local() -> None:
    state, local = stepped(1), values(7)
    found = state.pseudo_grads({i: part.clone() for i, part in local.items()})
    assert all(torch.equal(found[i], state.parts[i] - local[i]) for i in state.parts)


def test_a_commit_moves_params_momentum_and_position() -> None:
    before, after = stepped(1), stepped(2)
    assert after.position == Position(round=2, tokens=20)
    assert all(before.digests()[i] != after.digests()[i] for i in before.parts)


def test_the_digest_covers_the_momentum() -> None:
    state, other = stepped(2), stepped(2)
    position, part = unpack(state.pack(0), SPACE.parts[0].num_elements)
    part.momentum[1] += 1
    other.replace({0: part}, position)
    assert torch.equal(state.parts[0], other.parts[0])
    assert state.digests()[0] != other.digests()[0]


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.0}, {"momentum": 0.9}, {"delayed": True}, ALIGNED], ids=str
)
@pytest.mark.parametrize("num_rounds", [3, 4])
def test_a_state_handed_over_steps_as_the_donors_does(optimizer: dict, num_rounds: int) -> None:
    config = OuterOptimizerConfig(**optimizer)
    donor, joiner = stepped(num_rounds, config), GlobalState(values(9), config, NUM_ISLANDS)
    parts = {p.index: unpack(donor.pack(p.index), p.num_elements) for p in SPACE.parts}
    assert all(position == donor.position for position, _ in parts.values())
    joiner.replace({i: state for i, (_, state) in parts.items()}, donor.position)
    assert joiner.digests() == donor.digests()
    for state in (donor, joiner):
        state.commit(values(55), Position(round=4, tokens=40))
    assert joiner.digests() == donor.digests() and joiner.position == donor.position


def test_a_replaced_state_does_not_share_memory_with_the_bytes() -> None:
    donor, joiner = stepped(1), stepped(0)
    body = donor.pack(0)
    position, part = unpack(body, SPACE.parts[0].num_elements)
    joiner.replace({0: part}, position)
    part.params.zero_()
    assert torch.equal(joiner.parts[0], donor.parts[0])


def test_a_part_that_is_not_carried_is_refused() -> None:
    with pytest.raises(MessageError, match="part 99 is not carried"):
        stepped(1).pack(99)


HEADER = b'{"round":1,"tokens":5}\n'
BAD_BODIES = {
    "empty": b"",
    "no position": bytes(8 * 2),
    "too short": HEADER + bytes(8 * 2 - 1),
    "too long": HEADER + bytes(8 * 2 + 1),
    "a position that is none": b'{"round":1}\n' + bytes(8 * 2),
    "a negative round": b'{"round":-1,"tokens":5}\n' + bytes(8 * 2),
    "inf": HEADER + torch.tensor([1.0, torch.inf, 0.0, 0.0]).numpy().tobytes(),
    "nan momentum": HEADER + torch.tensor([1.0, 1.0, 0.0, torch.nan]).numpy().tobytes(),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_malformed_state_is_refused(kind: str) -> None:
    with pytest.raises(MessageError):
        unpack(BAD_BODIES[kind], 2)


def test_good_bytes_are_taken() -> None:
    position, part = unpack(HEADER + torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes(), 2)
    assert position == Position(round=1, tokens=5)
    assert part.params.tolist() == [1.0, 2.0] and part.momentum.tolist() == [3.0, 4.0]


# -- means kept for joiners ------------------------------------------------------------------------


def commit_coded(state: GlobalState, codec: Codec, round_number: int) -> None:
    """A round from `round_number` to the next, by means that went through the codec."""
    payloads = {i: codec.encode(v) for i, v in values(100 + round_number).items()}
    means = {i: codec.decode(p, SPACE.parts[i].num_elements) for i, p in payloads.items()}
    position = Position(round=round_number + 1, tokens=10 * (round_number + 1))
    state.commit(means, position, payloads, 1 + round_number % 2)


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.0}, {"momentum": 0.9}, {"delayed": True}, ALIGNED], ids=str
)
@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8"])
def test_a_part_brought_up_by_kept_means_is_bit_equal(codec_name: str, optimizer: dict) -> None:
    config, codec = OuterOptimizerConfig(**optimizer), build_codec(codec_name)
    state = stepped(1, config)
    parts = {p.index: unpack(state.pack(p.index), p.num_elements)[1] for p in SPACE.parts}
    for number in (1, 2):
        commit_coded(state, codec, number)
    for index, part in parts.items():
        for number in (1, 2):
            mean = state.mean(index, number)
            assert mean is not None
            num_given, coded = unpack_mean(mean)
            payload = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
            part = advance(
                part, codec.decode(payload, part.params.numel()), config, num_given, NUM_ISLANDS
            )
        assert part.round == 3
        assert part.digest == state.digests()[index]


@pytest.mark.parametrize(("codec_name", "num_kept"), [("fp32", 2), ("bf16", 4)])
def test_the_kept_means_are_no_larger_than_the_state(codec_name: str, num_kept: int) -> None:
    state = stepped(0)
    for number in range(8):
        commit_coded(state, build_codec(codec_name), number)
    kept = [number for number in range(8) if state.mean(0, number) is not None]
    assert kept == list(range(8 - num_kept, 8))
    kept_bytes = sum(
        len(unpack_mean(state.mean(part.index, r) or b"")[1]) for part in SPACE.parts for r in kept
    )
    assert kept_bytes <= 8 * SPACE.num_elements


def test_a_round_whose_bytes_are_not_given_ends_the_kept_means() -> None:
    state = stepped(0)
    commit_coded(state, build_codec("bf16"), 0)
    state.commit(values(5), Position(round=2, tokens=20))
    commit_coded(state, build_codec("bf16"), 2)
    assert [state.mean(0, number) is None for number in range(3)] == [True, True, False]


def test_a_replaced_state_keeps_no_means_of_the_one_before() -> None:
    state = stepped(0)
    commit_coded(state, build_codec("bf16"), 0)
    position, part = unpack(state.pack(0), SPACE.parts[0].num_elements)
    state.replace({0: part}, position)
    assert state.mean(0, 0) is None


def test_advancing_a_part_leaves_the_old_one_alone() -> None:
    _, part = unpack(stepped(2).pack(0), SPACE.parts[0].num_elements)
    before = part.params.clone(), part.momentum.clone()
    advance(part, values(3)[0], OuterOptimizerConfig())
    assert torch.equal(part.params, before[0]) and torch.equal(part.momentum, before[1])


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.0}, {"momentum": 0.9}, {"delayed": True}, ALIGNED], ids=str
)
@pytest.mark.parametrize("moments", [[], [1]], ids=["params", "with moments"])
def test_the_digests_after_a_commit_are_known_before_it(
    optimizer: dict, moments: list[int]
) -> None:
    state = GlobalState(values(0), OuterOptimizerConfig(**optimizer), NUM_ISLANDS, moments)
    for number in range(4):
        means = {i: mean for i, mean in values(number).items() if i % 2 == number % 2}
        before = state.digests()
        expected = before | {
            i: state.digest_after(i, mean, 1 + number % 2) for i, mean in means.items()
        }
        assert state.digests() == before, "nothing has changed"
        state.commit(means, Position(round=number + 1, tokens=10), num_given=1 + number % 2)
        assert state.digests() == expected != before


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.0}, {"nesterov": False}, {}, {"delayed": True}, ALIGNED], ids=str
)
@pytest.mark.parametrize("num_elements", [STRETCH_ELEMENTS, 2 * STRETCH_ELEMENTS + 13])
def test_a_part_stepped_in_stretches_has_the_digest_of_the_part_stepped_whole(
    optimizer: dict, num_elements: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *means = (torch.randn(num_elements, generator=generator) for _ in range(4))
    state = GlobalState({0: start}, OuterOptimizerConfig(**optimizer), NUM_ISLANDS)
    for number, mean in enumerate(means):
        expected = state.digest_after(0, mean, 2)
        state.commit({0: mean}, Position(round=number + 1, tokens=10), num_given=2)
        assert state.digests()[0] == expected


def test_a_commit_adopts_the_digests_that_were_found_before_it() -> None:
    state, digest = stepped(1), bytes(16)
    state.commit({0: values(5)[0]}, Position(round=2, tokens=20), digests={0: digest})
    assert state.digests()[0] == digest
    state.commit({0: values(6)[0]}, Position(round=3, tokens=30))
    assert state.digests()[0] != digest, "it is forgotten with the next step"
