"""The bytes and the time of a round, term by term, and the recommended settings."""

from dataclasses import replace
from math import prod

import pytest

from diloco.planning.advice import Rung, apply_changes, ladder, needed_bandwidth
from diloco.planning.predict import MANY_PEERS_SHARE, ROUND_MESSAGES, Case, LinkSpeed, predict
from inner.param_spec import ParamSpec
from outer.config import CodingConfig, OuterConfig
from outer.cost import HostSpeed, measure_host_speed, round_bytes
from outer.space.layout import Space

SPECS = (
    ParamSpec("embed.weight", (512, 256)),
    *(ParamSpec(f"layers.{i}.w", (512, 256)) for i in range(6)),
    ParamSpec("n", (256,)),
)
NUM_PARAMS = sum(prod(spec.shape) for spec in SPECS)
FREE = HostSpeed(encode=0.0, decode=0.0, merge=0.0, snapshot=0.0, step=0.0, write=0.0, digest=0.0)
IDEAL = LinkSpeed(1e6, payload_share=1.0)


def case(
    link: LinkSpeed = IDEAL,
    speed: HostSpeed = FREE,
    num_islands: int = 2,
    spread: float = 0.0,
    **outer: object,
) -> Case:
    """A run with inner steps of 1 s; by default fp32 over gloo on an ideal link of 1 Mbit/s."""
    config = OuterConfig.model_validate({"inner_steps": 12, "transport": "gloo"} | outer)
    return Case(
        outer=config,
        specs=SPECS,
        num_islands=num_islands,
        step_seconds=1.0,
        link=link,
        speed=speed,
        spread=spread,
    )


# What is sent


@pytest.mark.parametrize("num_islands", [1, 2, 3, 4, 7])
def test_islands_send_two_times_all_but_their_share(num_islands):
    (fragment,) = round_bytes(OuterConfig(), SPECS, num_islands)
    assert fragment.num_elements == NUM_PARAMS
    assert fragment.sent_bytes == pytest.approx(
        4 * NUM_PARAMS * 2 * (num_islands - 1) / num_islands, rel=1e-6
    )


def test_who_reduces_one_part_more_sends_most():
    num_parts = len(Space(SPECS, 262144).parts)
    assert num_parts % 3, "one of three islands has one part more"
    (fragment,) = round_bytes(OuterConfig(), SPECS, 3)
    assert fragment.most_bytes > fragment.sent_bytes
    (fragment,) = round_bytes(OuterConfig(), SPECS, 2)
    assert fragment.most_bytes == pytest.approx(fragment.sent_bytes, rel=0.01)


def test_fragments_together_send_what_the_whole_does():
    (whole,) = round_bytes(OuterConfig(), SPECS, 2)
    made = round_bytes(OuterConfig(fragments=4, inner_steps=30), SPECS, 2)
    assert len(made) == 4
    assert sum(fragment.num_elements for fragment in made) == whole.num_elements
    assert sum(fragment.sent_bytes for fragment in made) == whole.sent_bytes


def test_moments_every_third_and_sixth_cycle_are_half_as_many_bytes_again():
    plain, averaged = (
        predict(case(moments=moments, fragments=4, part_elements=1 << 14))
        for moments in (None, (3, 6))
    )
    assert averaged.sent_bytes == pytest.approx(1.5 * plain.sent_bytes, rel=1e-9)
    assert averaged.bits_per_param_step == pytest.approx(1.5 * plain.bits_per_param_step, rel=1e-9)
    assert averaged.transfer_seconds == pytest.approx(1.5 * plain.transfer_seconds, rel=0.03)
    assert len(round_bytes(OuterConfig(moments=(3, 6)), SPECS, 2)) == 6


def test_moments_go_in_bf16_beside_a_coarser_codec():
    plain, averaged = (
        round_bytes(OuterConfig(codec="int4", moments=m), SPECS, 2)[0] for m in (None, (1, 1))
    )
    assert averaged.sent_bytes - plain.sent_bytes == pytest.approx(2 * 2 * NUM_PARAMS, rel=0.01)


def test_sparse_payloads_go_to_every_other_island():
    two, four = (round_bytes(OuterConfig(codec="topk"), SPECS, count)[0] for count in (2, 4))
    assert four.sent_bytes == pytest.approx(3 * two.sent_bytes, rel=0.01)
    assert two.sent_bytes < NUM_PARAMS / 8


def test_the_last_mean_goes_to_every_other_island():
    two, four = (round_bytes(OuterConfig(), SPECS, count)[0] for count in (2, 4))
    assert four.last_bytes == 3 * two.last_bytes > 0


# What it takes


def test_a_blocking_round_takes_its_bytes_at_the_links_rate():
    p = predict(case(part_elements=1 << 16))
    # Two islands send all bytes once; the mean of the last of 16 parts comes when all else has.
    (fragment,) = round_bytes(OuterConfig(part_elements=1 << 16), SPECS, 2)
    assert p.transfer_seconds == pytest.approx(
        (32 * NUM_PARAMS + 8 * fragment.last_bytes) / 1e6, rel=1e-3
    )
    assert p.utilisation == pytest.approx(12.0 / (12.0 + p.transfer_seconds))
    assert fragment.last_bytes < fragment.sent_bytes / 10


def test_the_terms_are_the_total():
    speed = HostSpeed(
        encode=1e-8, decode=1e-8, merge=1e-8, snapshot=1e-8, step=1e-8, write=1e-8, digest=1e-9
    )
    p = predict(case(LinkSpeed(1e6, 0.05), speed, num_islands=4, spread=0.1, fragments=3, delay=1))
    rounds = p.transfer_seconds + p.trip_seconds + p.codec_seconds + p.step_seconds
    assert p.total_seconds == p.compute_seconds + rounds + p.copy_seconds + p.spread_seconds
    assert p.utilisation == p.compute_seconds / p.total_seconds
    assert min(vars(p).values()) > 0


def test_a_delay_hides_as_long_as_its_inner_steps_take():
    blocking = predict(case())
    behind = predict(case(delay=3))
    assert behind.hidden_seconds == pytest.approx(3.0)
    assert behind.total_seconds == pytest.approx(blocking.total_seconds - 3.0)


def test_a_delay_that_is_long_enough_hides_a_round_but_not_its_copies():
    speed = replace(FREE, snapshot=1e-6, write=1e-6)
    p = predict(case(LinkSpeed(1e8, payload_share=1.0), speed, delay=2))
    assert p.transfer_seconds == 0 and p.hidden_seconds == pytest.approx(
        p.busy_transfer_seconds, rel=0.1
    )
    assert p.total_seconds == pytest.approx(12.0 + 2e-6 * NUM_PARAMS)


def test_fragments_hide_a_delay_each():
    hidden = [predict(case(fragments=count, delay=1)).hidden_seconds for count in (1, 2, 4)]
    assert hidden == pytest.approx([1.0, 2.0, 4.0])


def test_a_fragment_costs_its_own_round_trips():
    one, four = (
        predict(case(LinkSpeed(1e12, 0.1), fragments=count)).trip_seconds for count in (1, 4)
    )
    assert one >= 0.3 and four == pytest.approx(4 * one, rel=0.5)


def test_a_round_alone_has_no_trips_and_no_transfer():
    p = predict(case(LinkSpeed(1e6, 0.1), num_islands=1))
    assert p.transfer_seconds == p.trip_seconds == p.sent_bytes == 0.0


@pytest.mark.parametrize(("codec", "payloads"), [("fp32", 2 * 1.5 * 8), ("topk", 2 * 3 * 9)])
def test_each_payload_that_goes_out_or_comes_in_takes_the_hosts_time(codec, payloads):
    speed = replace(FREE, message=1e-3)
    p = predict(case(speed=speed, num_islands=4, codec=codec))
    assert p.trip_seconds == pytest.approx(1e-3 * (payloads + ROUND_MESSAGES))
    assert predict(case(speed=speed, num_islands=1)).trip_seconds == 0.0


def test_a_link_to_more_than_one_peer_carries_less_than_its_payload_share():
    rates = []
    for num_islands in (2, 3):
        (fragment,) = round_bytes(OuterConfig(), SPECS, num_islands)
        p = predict(case(LinkSpeed(1e6), num_islands=num_islands))
        rates.append(8 * (fragment.most_bytes + fragment.last_bytes) / p.transfer_seconds)
    assert rates == pytest.approx([0.94e6, 0.94e6 * MANY_PEERS_SHARE])


def test_slow_start_is_a_few_round_trips_that_more_bandwidth_adds_to():
    slow, fast = (predict(case(LinkSpeed(rate, 0.1))).trip_seconds for rate in (1e5, 1e7))
    # Three in which nothing is lost to it: four messages one way each, and payloads there and back.
    assert slow == pytest.approx(0.3)
    assert 0.3 < fast < 1.0


def test_a_codec_counts_as_far_as_the_transfer_does_not_cover_it():
    fast, slow = replace(FREE, encode=1e-9), replace(FREE, encode=1e-4)
    covered, waited_for = (
        predict(case(speed=speed, part_elements=1 << 16)) for speed in (fast, slow)
    )
    assert covered.codec_seconds < covered.busy_codec_seconds / 10
    assert not covered.is_codec_slower and waited_for.is_codec_slower
    assert waited_for.codec_seconds + waited_for.transfer_seconds > waited_for.busy_codec_seconds


def test_ranks_share_the_hosts_work():
    speed = replace(FREE, encode=1e-6, step=1e-6, snapshot=1e-6)
    one, four = (predict(replace(case(speed=speed), ranks=ranks)) for ranks in (1, 4))
    for term in ("busy_codec_seconds", "step_seconds", "copy_seconds"):
        assert getattr(four, term) == pytest.approx(getattr(one, term) / 4)


def test_ranks_on_one_core_take_each_others_time():
    speed = HostSpeed(
        encode=1e-8, decode=2e-8, merge=3e-8, snapshot=4e-8, step=5e-8, write=6e-8, digest=7e-8
    )
    halved = HostSpeed(**{name: 2 * seconds for name, seconds in vars(speed).items()})
    alone, shared = predict(case(speed=speed)), predict(case(speed=halved))
    assert shared.busy_codec_seconds == pytest.approx(2 * alone.busy_codec_seconds)
    assert shared.copy_seconds == pytest.approx(2 * alone.copy_seconds)


def test_all_wait_for_the_slowest_unless_it_makes_fewer_steps():
    assert predict(case(spread=0.5)).spread_seconds == pytest.approx(6.0)
    assert predict(case(spread=0.5, local_steps="dynamic")).spread_seconds == 0.0


def test_timed_rounds_have_as_many_steps_as_there_is_time_for():
    p = predict(case(spread=0.5, local_steps="timed", round_seconds=4.5))
    assert (p.inner_steps, p.compute_seconds, p.spread_seconds) == (5, 5.0, 0.0)
    assert predict(case(fragments=2, local_steps="timed", round_seconds=4.5)).inner_steps == 10
    assert predict(case(local_steps="timed", round_seconds=100.0)).inner_steps == 12


def test_feedback_decodes_what_it_encodes():
    speed = replace(FREE, decode=1e-6)
    plain = predict(case(speed=speed, codec="int8")).busy_codec_seconds
    kept = predict(
        case(speed=speed, codec="int8", coding=CodingConfig(feedback=0.9))
    ).busy_codec_seconds
    assert kept == pytest.approx(plain * 3.5 / 2)


def test_the_host_is_measured_as_fast_as_it_can_be_at_all():
    speed = measure_host_speed(OuterConfig(codec="int8"))
    measured = [seconds for name, seconds in vars(speed).items() if name != "message"]
    assert all(1e-12 < seconds < 1e-5 for seconds in measured)


# What is recommended


def climb(target: float, **outer: object) -> list[Rung]:
    return ladder(case(**outer), target, lambda config: FREE)  # pyright: ignore


def test_nothing_is_recommended_to_a_run_that_is_good_enough():
    (rung,) = climb(0.2)
    assert rung.changes == {}


def test_the_codec_comes_first_then_overlap_then_more_inner_steps():
    assert [set(rung.changes) for rung in climb(0.3)] == [set(), {"codec"}]
    overlapped = climb(0.85)[-1]
    assert {"codec", "delay"} <= set(overlapped.changes) <= {"codec", "delay", "fragments", "mix"}
    rarer = ladder(case(LinkSpeed(1e5)), 0.9, lambda config: FREE)[-1]
    assert rarer.changes["inner_steps"] > 12


def test_the_delay_grows_with_the_inner_steps_whatever_the_fragments():
    start = case(LinkSpeed(3e5), fragments=5, delay=1, codec="int4")
    last = ladder(start, 0.97, lambda config: FREE)[-1]
    assert last.changes["inner_steps"] > 12 and last.changes["delay"] > 1


def test_the_last_line_reaches_the_target_and_each_is_better_than_the_one_before():
    shares = [rung.prediction.utilisation for rung in climb(0.9)]
    assert shares == sorted(shares)
    assert shares[-1] >= 0.9 and max(shares[:-1]) < 0.9


def test_slow_islands_are_to_make_fewer_steps_before_all_make_more():
    last = ladder(case(LinkSpeed(1e10), spread=0.3), 0.9, lambda config: FREE)[-1]
    assert last.changes == {"local_steps": "dynamic"}


def test_a_setting_that_wins_nothing_is_not_recommended():
    (rung,) = ladder(case(LinkSpeed(1e10)), 0.99999, lambda config: FREE)
    assert rung.changes == {}


def test_every_recommended_setting_is_a_valid_config():
    for rung in ladder(case(LinkSpeed(3e4)), 0.99, lambda config: FREE):
        OuterConfig.model_validate(rung.case.outer.model_dump())


def test_a_setting_changes_what_it_names_and_nothing_else():
    start = Rung({}, case(), predict(case()))
    after = apply_changes(start, lambda config: FREE, codec="int8", **{"coding.feedback": 0.5})
    assert after.case.outer == OuterConfig.model_validate(
        start.case.outer.model_dump() | {"codec": "int8", "coding": {"feedback": 0.5}}
    )


def test_the_needed_bandwidth_just_reaches_the_target():
    needed = needed_bandwidth(case(), 0.9)
    assert needed is not None
    link = replace(IDEAL, bits_per_second=needed)
    assert predict(case(link)).utilisation == pytest.approx(0.9, abs=0.002)
    assert needed_bandwidth(case(spread=1.0), 0.9) is None
