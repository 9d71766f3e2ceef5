"""How long an island waits for others in an attempt at a round. All limits follow from what this run measured."""

from outer.agreement.running.failure_detector import PING_SECONDS, SILENT_SECONDS
from outer.network.deadlines import DEFAULT_FLOOR_SECONDS, MAX_PATIENCE, Deadlines

FIRST_VOTE_REDUCES = 4.0
"""Until three votes have been measured, others may be later than this island by this many times its own reduce."""


def plan_limit(deadlines: Deadlines) -> float:
    """Longest wait for the plan of an island that should make one, in seconds: it may have to find another one lost."""
    return 2 * (PING_SECONDS + deadlines.limit("call"))


def vote_limit(deadlines: Deadlines, reduce_seconds: float) -> float:
    """Longest wait for the other votes and their receipts after this island's reduce took `reduce_seconds`."""
    if deadlines.typical("vote") is None:
        return min(deadlines.initial_seconds, max(DEFAULT_FLOOR_SECONDS, FIRST_VOTE_REDUCES * reduce_seconds))
    return deadlines.limit("vote")


def query_limit(deadlines: Deadlines) -> float:
    """Longest wait for the replies to a query of the outcome, in seconds."""
    return PING_SECONDS + deadlines.limit("call")


def held_up_limit(deadlines: Deadlines) -> float:
    """Seconds after which an island that is ready counts as held up: the bound T, or less while little is measured."""
    return min(deadlines.initial_seconds / 2, commit_bound(deadlines, 1))


def commit_bound(deadlines: Deadlines, num_waiting: int, num_absent: int = 0, num_attempts: int = 2) -> float:
    """Bound T, in seconds: `num_waiting` islands that are ready, connected and well commit within T of the last fault.

        T = detect + grace + num_attempts x (plan + reduce + vote + query)

    detect    3 s + limit of a call: who is dead or frozen is found to be lost
    grace     while `num_absent` islands live and are not ready, at its longest; 0 if there are none
    plan, reduce, vote, query    limits of an attempt, each at its worst

    One attempt may have begun before the fault, so two suffice when islands only die, freeze or are cut off. An island
    that lies or keeps silent costs one attempt more if it can be told. Otherwise minorities are left out in turn
    (suspicions.py): with n islands and one liar that is after at most 6 + 3 n attempts, with pauses of up to 2 s.
    """
    detect = SILENT_SECONDS + PING_SECONDS + deadlines.limit("call")
    longest = most_missed(num_waiting)
    grace = deadlines.grace(num_waiting, num_absent, longest) if num_absent else 0.0
    reduce = deadlines.limit("reduce")
    attempt = plan_limit(deadlines) + reduce + vote_limit(deadlines, reduce) + query_limit(deadlines)
    return detect + grace + num_attempts * attempt


def most_missed(num_waiting: int) -> int:
    """Most rounds that `num_waiting` islands commit in a row without another that is on its way.

    After so many they wait for it for MAX_PATIENCE rounds. An island that is ready that soon after the others, with the
    means of the last round and one inner step, takes part in the next round at the latest.
    """
    missed = 1
    while missed < MAX_PATIENCE * num_waiting:
        missed *= 2
    return missed
