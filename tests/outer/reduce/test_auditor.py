"""Which parts are audited: as often as the config says, and never foreseeably the same."""

import asyncio
import random

import pytest
import torch
from pydantic import ValidationError

from outer.agreement.messages import Plan
from outer.audits.commitments import Commitments
from outer.codecs import build_codec
from outer.codecs.choice import CodecChoice, build_codec_choice, build_uniform_choice
from outer.config import CodingConfig, GossipConfig, MergeConfig, OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.hooks import NO_HOOKS
from outer.identity.known_names import KnownNames
from outer.membership.loopback import LoopbackMessenger
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint
from outer.reduce.attempt import build_attempts
from outer.reduce.auditor import Auditor, audit_rate
from outer.reduce.payloads import Mean, Payloads
from outer.space.digest import part_digest
from outer.space.layout import Space
from outer.transports.loopback import Hub
from tests.outer.audits.plans import build_plan
from tests.outer.islands import GUARD_SECONDS, Spec
from tests.outer.nets import key_of

NUM_PARTS = 4096
SPACE = Space([Spec("w", (NUM_PARTS,))], part_elements=1)
MEANS = dict.fromkeys(range(NUM_PARTS), Mean(torch.empty(0), torch.empty(0)))


def build_auditor(island: str, probability: float, seed: int, codecs: CodecChoice) -> Auditor:
    payloads, commitments = Payloads(codecs, SPACE), Commitments(key_of(island), KnownNames())
    messenger: LoopbackMessenger = None  # type: ignore[assignment] # choosing needs no network
    own = (Endpoint(island, 0), commitments, payloads, MergeConfig(), messenger, Deadlines(1.0))
    return Auditor(probability, *own, draws=random.Random(seed))


FP32 = build_uniform_choice(build_codec("fp32"))


@pytest.mark.parametrize("names", ["ab", "abcd", "abcdefgh"])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_a_part_is_audited_by_somebody_with_the_probability_of_the_config(
    names: str, probability: float
):
    plan = build_plan(names)
    chosen = [
        build_auditor(n, probability, seed, FP32).choose(plan, MEANS)
        for seed, n in enumerate(names)
    ]
    audited = {part for parts in chosen for part in parts}
    spread = (NUM_PARTS * probability * (1 - probability)) ** 0.5
    assert abs(len(audited) - NUM_PARTS * probability) <= 4 * spread


def test_no_island_audits_what_it_reduced_itself_or_what_all_compute():
    plan = build_plan("abc")
    assert all(part % 3 != 1 for part in build_auditor("b", 1.0, 0, FP32).choose(plan, MEANS))
    gathered = CodecChoice(
        build_codec("topk"), build_codec("int8"), build_codec("fp32"), is_gathered=True
    )
    assert build_auditor("b", 1.0, 0, gathered).choose(plan, MEANS) == []


def test_one_that_is_alone_audits_nothing():
    assert audit_rate(1.0, 1) == 0.0


def test_an_island_draws_other_parts_each_time():
    plan, auditor = build_plan("ab"), build_auditor("a", 0.5, 0, FP32)
    assert auditor.choose(plan, MEANS) != auditor.choose(plan, MEANS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"coding": CodingConfig(feedback=0.9)}, "coding.feedback"),
        ({"merge": MergeConfig(rule="centered_clip")}, "merge.rule: centered_clip"),
        ({"merge": MergeConfig(max_norm_zscore=3.0)}, "merge.max_norm_zscore"),
        ({"merge": MergeConfig(min_cosine=0.1)}, "merge.min_cosine"),
        ({"gossip": GossipConfig()}, "leave out audit"),
    ],
)
def test_a_mean_that_depends_on_what_its_reducer_remembers_cannot_be_audited(
    changes: dict, text: str
):
    with pytest.raises(ValidationError, match=text):
        OuterConfig(audit=0.1, **changes)
    OuterConfig(audit=0.0, **changes)


def test_an_observer_audits_and_is_audited() -> None:
    """Island c contributes nothing; it reduces parts like the others, and recomputes theirs."""

    async def main() -> list[int]:
        hub, space = Hub(), Space([Spec("w", (900,))], part_elements=100)
        config = OuterConfig(transport="loopback", audit=1.0)
        codecs = build_codec_choice(config)
        settings = [
            NetworkSettings("run", name, 0, hub=hub, island_key=key_of(name)) for name in "abc"
        ]
        networks = [await open_network("loopback", each) for each in settings]
        attempts = [
            build_attempts(
                config, codecs, each.me, space, network, Deadlines(GUARD_SECONDS), NO_HOOKS
            )
            for each, network in zip(settings, networks, strict=True)
        ]
        participants = [
            ready.model_copy(
                update={
                    "carriers": [(0, len(space.parts))],
                    "control_addresses": [network.messenger.address],
                    "transport_addresses": [network.transport.address],
                }
            )
            for ready, network in zip(build_plan("abc").participants, networks, strict=True)
        ]
        participants[2] = participants[2].model_copy(
            update={"listens": True, "tokens": 0, "weight": 0}
        )
        plan = Plan(round=0, attempt=0, planner="a", participants=participants)
        values = {part.index: torch.randn(part.num_elements) for part in space.parts}
        means = await asyncio.gather(
            *(a.run(plan, v) for a, v in zip(attempts, (values, values, {}), strict=True))
        )
        assert (
            len({tuple(part_digest(mean[part].payload) for part in sorted(mean)) for mean in means})
            == 1
        )
        for network in networks:
            await network.close()
        return [each.num_audited for each in attempts]

    # Each of the 16 parts or so is audited by the two that did not reduce it.
    num_parts = len(Space([Spec("w", (900,))], part_elements=100).parts)
    assert sum(found := asyncio.run(main())) == 2 * num_parts and min(found) > 0
