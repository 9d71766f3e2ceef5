"""What an operator can do about each kind of incident."""

from collections.abc import Mapping, Sequence

CURES: Mapping[str, str] = {
    "disagreement": "the islands repair it themselves; keep the metrics.jsonl of both, and test "
    "the memory of the "
    "machine whose digest is alone",
    "died": "none if it is back; else start it again with the same command: it resumes and catches "
    "up",
    "failed": "read the end of the island's log; its launcher starts it again, or start it with "
    "the same command",
    "hung": "read hang-RANK.txt in the island's folder; its launcher starts it again",
    "stopped": "start the island again with the same command when it shall go on",
    "experts collapsed": "raise optimizer.balance.bias_speed, or set "
    "optimizer.balance.sequence_loss",
    "lost": "none if it comes back; else `diloco doctor ADDRESS` tests the path to it",
    "aborted": "none: the attempt changed nothing and was repeated; if it happens often, `diloco "
    "doctor ADDRESS`",
    "left out": "none if it happens once; if it repeats, look at that island's loss, data and "
    "versions",
    "alone": "find out why the other islands are away: their logs, or `diloco doctor ADDRESS`",
    "minority": "find out why the other islands are away: their logs, or `diloco doctor ADDRESS`",
    "refused": "none if the sender is a stranger; else give both islands the same config, key and "
    "version",
    "not saved": "make room in the folder of checkpoints, or set island.checkpoint.folder",
    "loss spike": "none if the loss comes back; else lower optimizer.lr, or set "
    "optimizer.spikes.action=skip",
    "went back": "none; if the losses break again, lower optimizer.lr",
    "rejected": "none: an earlier checkpoint is used",
    "dropped": "none: other islands trained that text",
    "left": "start it again with the same command when it shall go on",
}
BY_CAUSE: Sequence[tuple[str, str]] = (
    (
        "lack of memory",
        "lower island.micro_batch or give the island more memory; `diloco doctor --config` "
        "computes it",
    ),
    ("disk is full", "make room on the disk"),
    (
        "SIGKILL",
        "none if somebody killed it and it is back; else read `dmesg` and the scheduler's log",
    ),
)
"""Words of a cause, and the cure that they suggest instead."""


def find_cure(kind: str, cause: str) -> str:
    """Return what to do about an incident of this kind and cause."""
    if kind in ("died", "failed", "not saved"):
        for words, cure in BY_CAUSE:
            if words in cause:
                return cure
    return CURES.get(kind, "none needed")
