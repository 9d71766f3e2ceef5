"""Groups of experts, and what islands may claim of them: which claims, models and kinds of rounds
are refused.
"""

import pytest
import torch

from outer.agreement.messages import Plan
from outer.agreement.rules import Rules, check_ready, find_objection
from outer.codecs.choice import build_codec_choice, build_space
from outer.cost import round_bytes
from outer.errors import InputError, MessageError
from outer.space.experts import apportion
from outer.space.fragments import build_claims
from tests.outer.agreement.test_messages import NUM_PARTS, ready
from tests.outer.islands import Spec
from tests.outer.test_loop_experts import EXPERTS, PER_TOKEN, ROUTED, config, expert, model, specs

BAD_CLAIMS = {
    "add up to more": (
        (100, 100, 1, 0),
        "201 choices of experts were made in layer 1, but 2 x 100 tokens make 200",
    ),
    "add up to less": (
        (100, 0, 0, 99),
        "199 choices of experts were made in layer 1, but 2 x 100 tokens make 200",
    ),
    "one expert too often": (
        (101, 99, 0, 0),
        "101 choices of experts 0 to 0 of layer 1, which 100 tokens can choose 100",
    ),
    "too few counts": ((100, 100), "6 counts of tokens by expert, expected 8"),
}


@pytest.mark.parametrize(("counts", "problem"), BAD_CLAIMS.values(), ids=BAD_CLAIMS)
def test_an_impossible_claim_is_refused_by_name(counts: tuple[int, ...], problem: str) -> None:
    claims = build_claims(specs(), config(**ROUTED), PER_TOKEN)
    assert claims is not None
    claims.check("b", 0, 100, [100, 100, 0, 0, 100, 0, 100, 0])
    with pytest.raises(MessageError, match=f"'b' claims (that )?{problem}"):
        claims.check("b", 0, 100, [100, 100, 0, 0, *counts])


FAIR = [100, 100, 0, 0, 100, 0, 100, 0]
REFUSED_READIES = {
    "counts in a run that does not weigh by them": (
        False,
        {"expert_counts": FAIR},
        "which this run does not weigh by",
    ),
    "tokens in a run whose experts are as the rest": (
        False,
        {"expert_tokens": 1},
        "claims 1 tokens of experts, at most 0",
    ),
    "more tokens than a round has": (
        True,
        {"expert_tokens": 5001, "expert_counts": FAIR},
        "at most 5000 can be",
    ),
    "counts of an observer": (
        True,
        {"listens": True, "tokens": 0, "weight": 0, "expert_counts": FAIR},
        "observes, but",
    ),
    "no counts": (True, {"expert_tokens": 100}, "claims 0 counts of tokens by expert, expected 8"),
}


@pytest.mark.parametrize(
    ("routed", "changes", "problem"), REFUSED_READIES.values(), ids=REFUSED_READIES
)
def test_a_ready_with_impossible_counts_is_refused(
    routed: bool, changes: dict[str, object], problem: str
) -> None:
    claims = build_claims(specs(), config(**ROUTED), PER_TOKEN) if routed else None
    rules = Rules(num_parts=NUM_PARTS, max_tokens=5000, experts=claims, has_observers=True)
    honest = ready("b", expert_tokens=100, expert_counts=FAIR) if routed else ready("b")
    check_ready(honest, rules)
    with pytest.raises(MessageError, match=f"'b' .*{problem}"):
        check_ready(ready("b", **changes), rules)


def test_a_plan_with_impossible_counts_of_another_island_is_objected_to() -> None:
    rules = Rules(num_parts=NUM_PARTS, experts=build_claims(specs(), config(**ROUTED), PER_TOKEN))
    own = ready("a", expert_tokens=100, expert_counts=FAIR)
    liar = ready("b", expert_tokens=100, expert_counts=[200, *FAIR[1:]])
    plan = Plan(round=3, attempt=0, planner="b", participants=[own, liar])
    assert "'b' claims that 300 choices of experts" in (find_objection(plan, own, rules) or "")
    assert (
        find_objection(
            plan.model_copy(update={"participants": [own, own.model_copy(update={"island": "b"})]}),
            own,
            rules,
        )
        is None
    )


def test_claims_of_any_counts_are_possible_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    claims = build_claims(specs(), config(**ROUTED, experts={"group": 3}), PER_TOKEN)
    assert claims is not None
    for tokens in (0, 1, 7, 100):
        for routed in (
            0,
            tokens,
            3 * tokens + 1,
        ):  # Padding and targets that do not count make them differ.
            chosen = torch.randint(0, routed + 1, (1,), generator=generator).item()
            counts = {
                group: chosen if group.first else PER_TOKEN * routed - chosen
                for group in claims.groups[0]
            }
            claims.check("a", 0, tokens, claims.fill(0, counts, tokens))
    assert sum(apportion([1, 1, 1], 100)) == 100


@pytest.mark.parametrize("num_islands", [2, 4, 16])
def test_a_liar_who_claims_all_its_tokens_for_one_expert_weighs_at_most_as_the_bound_says(
    num_islands: int,
) -> None:
    """docs/security.md: 1 / (1 + (n - 1) k / E) of the expert's mean, if the others use all experts
    equally.
    """
    tokens, honest = 1000, PER_TOKEN * 1000 // EXPERTS
    claims = build_claims(specs(), config(num_islands, **ROUTED), PER_TOKEN)
    assert claims is not None
    most = max(c for c in range(2 * tokens) if is_possible(claims.check, tokens, c))
    share = most / (most + (num_islands - 1) * honest)
    assert share == pytest.approx(1 / (1 + (num_islands - 1) * PER_TOKEN / EXPERTS))


def is_possible(check: object, tokens: int, count: int) -> bool:
    rest = PER_TOKEN * tokens - count
    try:
        check("liar", 0, tokens, [count, min(rest, tokens), max(rest - tokens, 0), 0] * 2)  # type: ignore[operator]
    except MessageError:
        return False
    return True


REFUSED = {
    "rounds would leave experts out": ({"experts": {"every": 3}}, "does not divide rounds"),
    "a group without weights": ({"experts": {"group": 2}}, "which is for weights by routed tokens"),
    "moments": (
        {"moments": (1, 1), "merge": {"experts": "routed"}},
        "moments are averaged with the weights",
    ),
    "quorum": ({"experts": {"every": 2}, "wait_for": "quorum"}, "number of rounds is not known"),
    "gossip": (
        {"gossip": {}, "merge": {"experts": "routed"}},
        "gossip has no rounds of all islands",
    ),
    "gossip less often": (
        {"gossip": {}, "experts": {"every": 2}},
        "gossip has no rounds of all islands",
    ),
    "a rule that compares": (
        {"experts": {"every": 2}, "merge": {"min_cosine": 0.0}},
        "which has no experts",
    ),
}


@pytest.mark.parametrize(("changes", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_kind_of_round_that_cannot_do_it_is_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        config(**changes)


def test_a_model_without_experts_or_without_counts_is_refused() -> None:
    dense = [spec for spec in specs() if spec.expert is None]
    with pytest.raises(
        InputError, match=r"outer.experts is for mixtures of experts, and the model has no experts"
    ):
        build_claims(dense, config(experts={"codec": "int4"}), 0)
    with pytest.raises(InputError, match="needs the counts of our own routers"):
        build_claims(specs(), config(**ROUTED), 0)
    many = [Spec(expert(layer, number), (8, 8)) for layer in range(40) for number in range(128)]
    with pytest.raises(InputError, match=r"set outer.experts.group to 2 or more"):
        build_claims(many, config(**ROUTED), 8)


def test_experts_have_a_codec_of_their_own_and_are_missing_in_rounds_without_them() -> None:
    large = [Spec("embed", (64, 64)), *(Spec(expert(0, number), (64, 64)) for number in range(4))]
    outer = config(experts={"codec": "int4", "every": 2}, codec="bf16", part_elements=1 << 12)
    space = build_space(large, outer)
    codecs = build_codec_choice(outer)
    sizes = {
        p.is_experts: codecs.codec_for(p).num_bytes(p.num_elements) / p.num_elements
        for p in space.parts
    }
    assert sizes[False] == 2.0 and 0.5 <= sizes[True] < 0.6
    assert all(codecs.mean_codec_for(p) is codecs.codec_for(p) for p in space.parts)
    without, with_experts = round_bytes(outer, tuple(large), 3)
    assert (without.num_elements, with_experts.num_elements) == (64 * 64, 5 * 64 * 64)


def test_settings_of_experts_leave_the_parts_of_a_run_that_does_not_set_them_as_they_were() -> None:
    space = build_space(specs(), config())
    assert [group.names for group in space.part_groups] == [tuple(model())]
    assert "experts" not in config().model_dump(exclude=config().later_defaults)
