"""Error feedback, fine tensors, gathered payloads: coding errors are sent in later rounds, after
commits only.
"""

import threading
from functools import partial

import pytest
import torch

from outer.codecs import build_codec
from outer.codecs.choice import build_codec_choice, build_space
from outer.config import CodingConfig, MergeConfig, OuterConfig, OuterOptimizerConfig
from outer.network.frames import HEADER_BYTES
from outer.reduce.error_feedback import ErrorFeedback
from tests.outer.islands import GUARD_SECONDS, Island, Spec, fails_in, run_islands
from tests.outer.streams import layered

torch.set_num_threads(1)

AVERAGE = OuterOptimizerConfig(lr=1.0, momentum=0.0)
COARSE = ["int4", "e3m0", "stat2", "topk", "lowrank"]
MODEL = partial(layered, scale=200)
"""A model with some fine tensors."""
ALL = CodingConfig(top_k=256, chunk_elements=256, value_bits=32)


def config(
    codec: str, num_islands: int = 2, *, feedback: float | None = None, **changes: object
) -> OuterConfig:
    coding = changes.pop("coding", CodingConfig(feedback=feedback))
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(
        **{**fields, "codec": codec, "coding": coding, "optimizer": AVERAGE, **changes}
    )


def digests(num_rounds: int, island: Island) -> list[str]:
    island.outer.begin()
    return [island.round().digest for _ in range(num_rounds)]


def residuals(island: Island) -> list[dict[int, torch.Tensor]]:
    """The residuals of the island's pseudo-gradients, and of its means."""
    return [dict(feedback.residuals) for feedback in island.outer.averager.memory.feedbacks]


def equal(left: list[dict[int, torch.Tensor]], right: list[dict[int, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[i], b[i]) for i in a)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_the_residual_is_the_decayed_sum_of_what_was_not_sent(decay: float) -> None:
    codec, feedback = (
        build_codec("topk", CodingConfig(top_k=8, chunk_elements=64)),
        ErrorFeedback(decay),
    )
    generator = torch.Generator().manual_seed(1)
    expected = torch.zeros(256, dtype=torch.float64)
    for _ in range(12):
        values = torch.randn(256, generator=generator)
        sent = codec.decode(feedback.encode(0, values, codec), 256)
        feedback.commit()
        expected = decay * expected + values - sent
    torch.testing.assert_close(feedback.residuals[0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("feedback", [None, 0.95])
def test_sending_every_element_as_it_is_equals_plain_averaging(feedback: float | None) -> None:
    def script(island: Island) -> torch.Tensor:
        digests(4, island)
        return island.params.flat()

    made = config("topk", coding=ALL.model_copy(update={"feedback": feedback}))
    sparse = run_islands(dict.fromkeys("ab", script), made, model=partial(layered, scale=1000))
    plain = run_islands(
        dict.fromkeys("ab", script), config("fp32"), model=partial(layered, scale=1000)
    )
    torch.testing.assert_close(sparse["a"], plain["a"], rtol=0, atol=1e-6)
    assert torch.equal(sparse["a"], sparse["b"])


@pytest.mark.parametrize("codec", COARSE)
def test_digests_are_equal_everywhere_with_every_coarse_codec_and_feedback(codec: str) -> None:
    made = config(codec, 3, feedback=0.9, fragments=3, inner_steps=3)
    found = run_islands(dict.fromkeys("abc", partial(digests, 4)), made, model=MODEL)
    assert found["a"] == found["b"] == found["c"] and len(set(found["a"])) == 4


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_an_aborted_attempt_leaves_the_residuals_as_they_were(codec: str) -> None:
    def script(island: Island) -> tuple[bool, list[str]]:
        found = digests(1, island)
        before = residuals(island)
        island.train(1)
        assert not island.attempt(100).is_committed
        is_same = equal(before, residuals(island))
        found.append(island.commit().digest)
        assert not equal(before, residuals(island)), "a commit moves them"
        return is_same, found

    made = config(codec, feedback=0.9)
    failed = run_islands(dict.fromkeys("ab", script), made, model=MODEL, faults={"b": fails_in(1)})
    smooth = run_islands(dict.fromkeys("ab", partial(digests, 2)), made, model=MODEL)
    for name in "ab":
        assert failed[name] == (True, smooth[name])


def test_a_joiner_has_no_residual_and_commits_equal_digests() -> None:
    begun, joined = threading.Event(), threading.Event()
    made = config("stat2", 1, feedback=0.9)

    def old(island: Island) -> list[str]:
        digests(2, island)
        assert residuals(island)[0]
        begun.set()
        assert joined.wait(GUARD_SECONDS)
        return [island.round().digest for _ in range(2)]

    def joiner(island: Island) -> list[str]:
        assert begun.wait(GUARD_SECONDS)
        island.outer.begin()
        assert residuals(island) == [{}, {}]
        joined.set()
        return [island.round().digest for _ in range(2)]

    found = run_islands({"a": old, "b": joiner}, made, model=MODEL)
    assert found["a"] == found["b"]


def test_fine_tensors_have_parts_of_their_own_at_eight_bits() -> None:
    made = config("stat2")
    codecs = build_codec_choice(made)
    specs = [Spec(name, tuple(values.shape)) for name, values in MODEL().items()] + [
        Spec("norm", (9000,))
    ]
    space = build_space(specs, made)
    for part in space.parts:
        names = {space.name_at(index) for index in range(part.start, part.stop)}
        is_fine = {
            len(space.shapes[n]) < 2 or space.shapes[n][0] * space.shapes[n][1] < 4096
            for n in names
        }
        assert is_fine == {part.is_fine}
        assert codecs.codec_for(part).name == ("int8" if part.is_fine else "stat2")
    assert {part.is_fine for part in space.parts} == {False, True}


@pytest.mark.parametrize("codec", ["fp32", *COARSE])
def test_bytes_of_a_round_are_the_codecs_and_its_headers(codec: str) -> None:
    made = config(codec, 3)

    def script(island: Island) -> tuple[int, int, int]:
        island.outer.begin()
        space, codecs = island.outer.replica.space, build_codec_choice(made)
        gathered = [p for p in space.parts if codecs.gathers(p)]
        reduced = [p for p in space.parts if not codecs.gathers(p)]
        # Of 3 islands, 2 send a reduced part once and its reducer sends the mean twice; a gathered
        # one goes to all.
        sent = sum(
            4 * codecs.codec_for(p).num_bytes(p.num_elements) + 4 * HEADER_BYTES for p in reduced
        )
        sent += sum(
            6 * codecs.codec_for(p).num_bytes(p.num_elements) + 6 * HEADER_BYTES for p in gathered
        )
        report = island.round()
        return report.bytes_sent, report.bytes_received, sent

    found = run_islands(dict.fromkeys("abc", script), made, model=MODEL)
    assert (
        sum(sent for sent, _, _ in found.values())
        == found["a"][2]
        == sum(got for _, got, _ in found.values())
    )


def test_both_denominators_of_sparse_payloads_can_be_had_and_differ() -> None:
    def script(island: Island) -> torch.Tensor:
        digests(2, island)
        return island.params.flat()

    start = torch.cat([values.flatten() for values in MODEL().values()])
    moved = {}
    for rule in ("mean", "contributors"):
        made = config("topk", feedback=0.95, merge=MergeConfig(rule=rule))
        moved[rule] = (
            run_islands(dict.fromkeys("ab", script), made, model=MODEL)["a"] - start
        ).norm()
    # Two islands seldom pick the same elements: the mean over all halves what the mean over
    # contributors keeps.
    assert 1.2 * moved["mean"] < moved["contributors"] <= 2.001 * moved["mean"]


def test_two_bits_with_feedback_follow_the_mean_that_two_bits_without_do_not() -> None:
    def script(island: Island) -> torch.Tensor:
        digests(12, island)
        return island.params.flat()

    ends = {
        name: run_islands(dict.fromkeys("ab", script), made, model=MODEL)["a"]
        for name, made in {
            "exact": config("fp32"),
            "without": config("stat2"),
            "with": config("stat2", feedback=1.0),
        }.items()
    }
    errors = {name: (ends[name] - ends["exact"]).norm() for name in ("with", "without")}
    assert errors["with"] < 0.7 * errors["without"]
