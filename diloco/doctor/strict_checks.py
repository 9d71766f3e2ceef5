"""Checks of `diloco doctor --strict`: whether the settings protect a run from its own members.

docs/security.md has the recipe, and says what each setting is for.
"""

from collections.abc import Iterator

from diloco.config.schema import IslandConfig, RunConfig
from diloco.doctor.checks import Check
from diloco.swarm.visit import LocalIsland
from outer.config import OuterConfig
from outer.errors import InputError
from outer.identity.island_key import KEY_FILE, load_island_key


def check_strict(local: LocalIsland, run: RunConfig) -> Iterator[Check]:
    """Check the settings of a strict run, then the settings of the island on this machine."""
    yield check_network(run.outer)
    yield check_quorum(run.outer)
    yield check_audit(run.outer)
    yield check_bound(run.outer)
    yield check_run_key(local.island)
    yield check_allow(local, run)
    yield check_own_code(local.island)
    yield check_signatures(local.island)


def check_network(outer: OuterConfig) -> Check:
    """Check that outsiders can neither read nor alter the messages between islands."""
    if not outer.network.encrypts:
        return Check(
            "FAILED", "outer.transport", f"{outer.transport} encrypts nothing; use tls or hivemind"
        )
    return Check("ok", "outer.transport", f"{outer.transport} encrypts calls and payloads")


def check_quorum(outer: OuterConfig) -> Check:
    """Check that no minority of islands can commit."""
    if outer.gossip is not None:
        return Check("FAILED", "outer.gossip", "gossip has no votes and no quorum; leave it out")
    least = outer.start_islands // 2 + 1
    if outer.quorum < least:
        text = f"{outer.quorum} of {outer.start_islands} islands may commit without the others"
        return Check("FAILED", "outer.quorum", f"{text}; set outer.quorum={least} or higher")
    if outer.below_quorum == "continue":
        text = (
            "with 'continue' fewer islands than outer.quorum commit when the others are unreachable"
        )
        return Check("FAILED", "outer.below_quorum", f"{text}; set it to wait or stop")
    return Check(
        "ok",
        "outer.quorum",
        f"{outer.quorum} of {outer.start_islands} islands, so no minority commits",
    )


def check_audit(outer: OuterConfig) -> Check:
    """Check that a reducer's wrong mean is detected."""
    if outer.audit == 0:
        text = "nobody checks that a reducer's mean is the mean of the payloads"
        return Check("FAILED", "outer.audit", f"{text}; set outer.audit=0.1, for example")
    return Check("ok", "outer.audit", f"{outer.audit:.0%} of all parts are computed a second time")


def check_bound(outer: OuterConfig) -> Check:
    """Check that the length of a pseudo-gradient is bounded."""
    merge = outer.merge
    if merge.refuse_norm_ratio is not None:
        text = (
            f"nothing longer than {merge.refuse_norm_ratio:g} times what healthy islands make "
            "is committed"
        )
        return Check("ok", "outer.merge", text)
    text = "one island can move the mean anywhere"
    return Check(
        "FAILED", "outer.merge", f"{text}; leave outer.merge.refuse_norm_ratio at its default"
    )


def check_run_key(island: IslandConfig) -> Check:
    """Check that strangers cannot become members."""
    if island.run_key_file is None:
        text = "whoever reaches a port is a member"
        return Check(
            "FAILED",
            "island.run_key_file",
            f"{text}; give all islands the same file of 32 random bytes",
        )
    return Check("ok", "island.run_key_file", "only holders of the run key are members")


def check_allow(local: LocalIsland, run: RunConfig) -> Check:
    """Check that a member cannot take part under new keys, and that this island's key is listed."""
    allowed = local.island.allow
    if not allowed:
        text = "whoever holds the run key may take part with as many keys as it makes"
        return Check(
            "FAILED",
            "island.allow",
            f"{text}; list the islands' keys, which `diloco key CONFIG` prints",
        )
    file = local.island.folder(run.name) / KEY_FILE
    if not file.exists():
        return Check(
            "ok",
            "island.allow",
            f"{len(allowed)} keys; this island has none yet, `diloco key` makes it",
        )
    try:
        own = load_island_key(file).public
    except InputError as error:
        return Check("FAILED", "island.allow", str(error))
    if own not in allowed:
        return Check(
            "FAILED",
            "island.allow",
            f"this island's own key {own} is not listed; add it on all islands",
        )
    return Check("ok", "island.allow", f"{len(allowed)} keys, this island's among them")


def check_own_code(island: IslandConfig) -> Check:
    """Check that a swarm's config can run no code here that has not been read."""
    if island.allow_imports:
        text = f"a swarm's config may run {', '.join(island.allow_imports)}"
        return Check(
            "warning",
            "allow_imports",
            f"{text}: read that code, and allow single paths, not packages",
        )
    return Check("ok", "allow_imports", "a swarm's config runs no code here")


def check_signatures(island: IslandConfig) -> Check:
    """Check that the island resumes only from checkpoints that members have signed."""
    if island.checkpoint.accept_unsigned:
        text = "whoever can write to the folder decides which weights the run goes on with"
        return Check(
            "FAILED", "accept_unsigned", f"{text}; set island.checkpoint.accept_unsigned=false"
        )
    return Check("ok", "accept_unsigned", "checkpoints without a signature are refused")
