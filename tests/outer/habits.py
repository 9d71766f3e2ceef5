"""What liars make of the messages that they send: each habit is a function of one message."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from outer.agreement.coordination import PlanNotice
from outer.agreement.messages import (
    Goodbye,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Ready,
    Settled,
    Status,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.proofs.certificate import Certificate, Proof, Statement, build_certificate
from outer.network.messages import Message
from tests.outer.signers import FakeSigner, public_of
from tests.outer.world import digest_after, digest_of

if TYPE_CHECKING:
    from tests.outer.lies import Run

Habit = Callable[["Run", str, str, Message], Message | None]
"""What a liar makes of a message: (run, liar, receiver, message) to what it sends, or None to send
nothing.
"""


def wrong_digest(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    plan = run.nodes[liar].plan
    if (
        not isinstance(message, Vote)
        or message.digest is None
        or plan is None
        or message.plan != plan.id
    ):
        return message
    digest = digest_of(liar + to * run.chance.randint(0, 1))
    signature = run.nodes[liar].knowledge.signer.sign(plan.statement(digest).text)
    return message.model_copy(update={"digest": digest, "signature": signature})


def no_votes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Vote) else message


def no_receipts(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, VoteReceipt | OutcomeReply) else message


def no_plans(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Plan) else message


def votes_to_some(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Vote | Plan) and run.chance.random() < 0.5 else message


def plain_noes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Vote):
        return message
    return Vote(plan=message.plan, round=message.round, island=liar, cause="disk full")


def false_accusations(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Vote):
        return message
    accused = run.chance.choice(run.honest)
    return Vote(plan=message.plan, round=message.round, island=liar, cause="nan", accused=accused)


def aborted(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    is_answer = isinstance(message, VoteReceipt | OutcomeReply)
    return message.model_copy(update={"outcome": "abort"}) if is_answer else message


def queries(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Asks for the outcome of each plan at once, so that nobody commits it on votes alone."""
    if isinstance(message, Vote):
        run.send(liar, to, OutcomeQuery(plan=message.plan, round=message.round))
    return message


def claims_to_be_ahead(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Status) or run.chance.random() < 0.5:
        return message
    return Status(
        round=99, tokens=1 << run.chance.randint(40, 60), digest=digest_of(liar), is_coming=True
    )


def comes_and_goes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if run.chance.random() < 0.7:
        return message
    return Goodbye(island=liar, incarnation="0" * 8, round=0, steps=0)


def never_ready(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return message if not isinstance(message, Ready) or run.chance.random() < 0.3 else None


def no_lists(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, VoteList) else message


def lists_to_some(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return (
        None if isinstance(message, VoteList | Settled) and run.chance.random() < 0.5 else message
    )


def passes_on_other_plans(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Makes another plan of what it passes on, and of its own what its notice does not say."""
    if not isinstance(message, Plan) or run.chance.random() < 0.3:
        return message
    attempt = message.attempt + 1
    return Plan(
        round=message.round,
        attempt=attempt,
        planner=message.planner,
        participants=message.participants,
    )


def notices_of_nothing(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Gives notice of plans that it has not made, and none of some that it has."""
    if isinstance(message, PlanNotice):
        return None if run.chance.random() < 0.5 else message
    if isinstance(message, Ready | Plan):
        run.send(
            liar, to, PlanNotice(plan=f"{run.chance.getrandbits(128):032x}", round=message.round)
        )
    return message


def forged_lists(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Changes a signature in the lists that it passes on, and acknowledges lists that it does not
    have.
    """
    if isinstance(message, Vote):
        run.send(liar, to, VoteReceipt(plan=message.plan, outcome="open"))
    if not isinstance(message, VoteList):
        return message
    return message.model_copy(update={"signatures": ["0" * 128, *message.signatures[1:]]})


def settled_too_early(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if isinstance(message, VoteList):
        run.send(liar, to, Settled(plan=message.plan, round=message.round))
    return message


def miscounts(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """As the coordinator it says that few are ready, or more than there are."""
    if not isinstance(message, Status):
        return message
    return message.model_copy(update={"num_ready": run.chance.choice([0, 1, 9])})


def false_commits(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Keeps its votes from some, and tells some of those who ask that it has committed."""
    if isinstance(message, Vote):
        return message if run.chance.random() < 0.5 else None
    if not isinstance(message, OutcomeReply) or run.chance.random() < 0.3:
        return message
    plan = run.nodes[liar].plan
    certificate = None if plan is None else forge(run, liar, plan.statement(digest_after(plan)))
    return OutcomeReply(plan=message.plan, outcome="commit", certificate=certificate)


def made_up_states(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Claims to be ahead with a state that it has made up and gives to whoever asks, and forges
    proofs of it.

    It invents islands that sign, too, except for islands that know no other from a commit: those
    cannot tell.
    """
    if isinstance(message, Status):
        here = run.nodes[liar].knowledge.status
        digest = f"{run.chance.randint(0, 3):016x}"
        return Status(
            round=here.round + run.chance.randint(0, 2), tokens=here.tokens + 30, digest=digest
        )
    claim = run.nodes[to].knowledge.claims.asked.get(liar) if to in run.nodes else None
    if not isinstance(message, Proof) or claim is None:
        return message
    base = {"plan": "0" * 32, "base": digest_of(liar), "base_tokens": 0}
    can_tell = run.nodes[to].knowledge.claims.witnesses.num_others > 0
    invented = [liar, "z1", "z2"] if can_tell else [liar]
    islands = sorted(run.chance.choice([invented, list(run.nodes)]))
    statement = Statement(
        **base,
        round=max(0, claim.round - 1),
        tokens=claim.tokens,
        digest=claim.digest,
        islands=islands,
        keys=[public_of(name) for name in islands],
    )
    return Proof(certificate=forge(run, liar, statement))


def forge(run: "Run", liar: str, statement: Statement) -> Certificate:
    """The best that a liar can do: its own signature, those of islands that it has invented, and
    noise for others'.
    """
    signers = {
        name: FakeSigner(name)
        for name in statement.islands
        if name == liar or name not in run.nodes
    }
    noise = f"{run.chance.getrandbits(512):0128x}"
    signatures = {
        name: signers[name].sign(statement.text) if name in signers else noise
        for name in statement.islands
    }
    return build_certificate(statement, signatures)


HABITS: list[Habit] = [
    wrong_digest,
    no_votes,
    no_receipts,
    no_plans,
    votes_to_some,
    plain_noes,
    false_accusations,
    aborted,
    queries,
    claims_to_be_ahead,
    comes_and_goes,
    never_ready,
    false_commits,
    no_lists,
    lists_to_some,
    settled_too_early,
    miscounts,
    passes_on_other_plans,
    notices_of_nothing,
    forged_lists,
]
WITH_A_QUORUM = [*HABITS, made_up_states]
"""With a quorum of one, an island alone may make a history, so it may make one up, too."""
