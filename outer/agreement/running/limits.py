"""Time limits for waiting on other islands in an attempt at a round. All limits follow from
measurements of this run.
"""

from outer.agreement.running.failure_detector import PING_SECONDS, SILENT_SECONDS
from outer.network.deadlines import DEFAULT_FLOOR_SECONDS, MAX_PATIENCE, Deadlines

FIRST_VOTE_REDUCES = 4.0
"""Until three votes have been measured, the limit for votes is this multiple of the island's own
reduce time."""


def plan_limit(deadlines: Deadlines) -> float:
    """Return the longest wait, in seconds, for a plan. It includes the time in which the planner
    may detect a loss.
    """
    return 2 * (PING_SECONDS + deadlines.limit("call"))


def vote_limit(deadlines: Deadlines, reduce_seconds: float) -> float:
    """Return the longest wait, in seconds, for the other votes and their receipts.
    `reduce_seconds`: duration of this island's reduce.
    """
    if deadlines.typical("vote") is None:
        return min(
            deadlines.initial_seconds,
            max(DEFAULT_FLOOR_SECONDS, FIRST_VOTE_REDUCES * reduce_seconds),
        )
    return deadlines.limit("vote")


def query_limit(deadlines: Deadlines) -> float:
    """Return the longest wait, in seconds, for the replies to an outcome query."""
    return PING_SECONDS + deadlines.limit("call")


def held_up_limit(deadlines: Deadlines) -> float:
    """Return the seconds after which a ready island counts as delayed: the bound T, or less
    while little is measured.
    """
    return min(deadlines.initial_seconds / 2, commit_bound(deadlines, 1))


def commit_bound(
    deadlines: Deadlines, num_waiting: int, num_absent: int = 0, num_attempts: int = 2
) -> float:
    """Return the bound T in seconds: `num_waiting` ready, connected and healthy islands commit
    within T of the last fault.

    T = detect + grace + num_attempts x (plan + reduce + vote + query)

    detect: 3 s + the limit of a call, in which dead and frozen islands are found to be lost.

    grace: the longest wait while `num_absent` islands live and are not ready; 0 if there are none.

    plan, reduce, vote, query: the limits of an attempt, each at its longest.

    One attempt may have begun before the fault, so two suffice when islands only die, freeze or are
    cut off. An island that lies or keeps silent costs one more attempt if it can be identified.
    Otherwise minorities are left out in turn (suspicions.py): with n islands and one liar this
    takes at most 6 + 3 n attempts, with pauses of up to 2 s.
    """
    detect = SILENT_SECONDS + PING_SECONDS + deadlines.limit("call")
    longest = most_missed(num_waiting)
    grace = deadlines.grace(num_waiting, num_absent, longest) if num_absent else 0.0
    reduce = deadlines.limit("reduce")
    attempt = (
        plan_limit(deadlines) + reduce + vote_limit(deadlines, reduce) + query_limit(deadlines)
    )
    return detect + grace + num_attempts * attempt


def most_missed(num_waiting: int) -> int:
    """Return the most rounds in a row that `num_waiting` islands commit without an island that is
    coming.

    After that number of rounds they wait for it for the time of MAX_PATIENCE rounds. An island that
    within this time can apply the means of the last round and make one inner step takes part in the
    next round at the latest.
    """
    missed = 1
    while missed < MAX_PATIENCE * num_waiting:
        missed *= 2
    return missed
