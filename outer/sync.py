"""The outer loop of one island: begin or join, then a round after every `inner_steps` inner steps.

    gather local params -> pseudo-gradient -> plan -> reduce -> vote -> commit: outer step, write back
                                               ^________________|  abort: nothing changed, next attempt

Every rank of the island makes the same calls in the same order; the leader speaks to other islands.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from outer.agreement import Agreement, Behind, Rules
from outer.attempt import Attempts
from outer.codecs import build_codec
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.errors import OuterError, TransportError
from outer.exchange import Params
from outer.island_state import IslandState
from outer.loop import LoopThread
from outer.membership.base import Member, Membership
from outer.network import Network
from outer.phases import NO_HOOKS, Hooks
from outer.reduce import Mean, Reducer
from outer.rounds import Plan, Ready, pack_carriers, parse
from outer.state import Position
from outer.team import Team
from outer.transfer import Donor, fetch_state
from outer.transports.base import Endpoint

log = logging.getLogger(__name__)

TAKE_STATE_TRIES = 10
TAKE_STATE_PAUSE_SECONDS = 0.5
"""A donor that commits while its state is being taken makes the taker start again."""


@dataclass(frozen=True)
class Identity:
    """Who this island is in the run. A new process of the same island is a new incarnation."""

    island: str
    incarnation: str
    identity: str
    """The same for every incarnation."""
    config_hash: str


@dataclass(frozen=True)
class RoundReport:
    """What came of one attempt at a round, as this island saw it; bytes are its ranks' since the last report."""

    round: int
    attempt: int
    participants: list[str]
    is_committed: bool
    digest: str
    """Of the global params and outer momentum afterwards."""
    bytes_sent: int
    bytes_received: int
    reduce_seconds: float
    wait_seconds: float
    pseudo_grad_norm: float
    cause: str


class OuterLoop:
    """One rank's side of the outer loop."""

    def __init__(
        self,
        config: OuterConfig,
        identity: Identity,
        params: Params,
        team: Team,
        network: Network,
        loop: LoopThread,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self._hooks = hooks
        self._identity, self._team, self._network, self._loop = identity, team, network, loop
        codec = build_codec(config.codec)
        self._held = IslandState(config, codec.block_elements, params, team)
        self._addresses = team.gather((network.transport.address, network.messenger.address))
        self._deadlines = Deadlines(config.wait_seconds)
        me = Endpoint(identity.island, team.rank)
        reducer = Reducer(network.transport, codec, self._held.space, me, self._hooks)
        self._counted = 0, 0
        self._attempts = Attempts(network.transport, reducer, self._deadlines)
        self._donor = Donor(self._held.mine, network.messenger)
        self._agreement = self._build_agreement(config) if team.is_leader else None
        if self._agreement is None:
            network.messenger.serve("vote", self._attempts.on_vote)

    @property
    def position(self) -> Position:
        """Where the run stands, as far as this island knows."""
        return self._held.mine.position

    @property
    def digest(self) -> str:
        """Of the global params and outer momentum that this island holds."""
        return self._held.digest

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        return self._held.space.num_elements

    def begin(self) -> Position:
        """Enter the run: with the islands' state if they have committed a round, else from the start with them."""
        donor = self._team.on_leader(self._find_donor)
        if donor is not None:
            self._take_state(donor)
        self._announce()
        return self.position

    def attempt(self, tokens: int) -> RoundReport:
        """One attempt at the round, with the island's progress since the last commit, made on `tokens` tokens.

        Not committed means that nothing has changed, on any island: call it again at once. Raises Behind after
        having taken another island's state, by which local progress of the round is dropped; OuterError when
        this island's own pseudo-gradient cannot be used, or too few islands come.
        """
        started = time.monotonic()
        pseudo_grads, norm = self._held.pseudo_grads()
        plan = self._plan(tokens)
        planned = time.monotonic()
        means, failure = self._reduce(plan, pseudo_grads)
        digest, cause, is_fatal = self._result(means, failure)
        reduced = time.monotonic()
        is_committed = self._team.on_leader(lambda: self._loop.run(self._agree.decide(plan, digest, cause)))
        if is_committed:
            self._deadlines.observe("reduce", reduced - planned)
            self._commit(plan, means)
        else:
            self._loop.run(self._attempts.drop())
        if is_fatal:
            raise OuterError(cause)
        sent, received = self._traffic()
        return RoundReport(
            round=plan.round,
            attempt=plan.attempt,
            participants=plan.names,
            is_committed=is_committed,
            digest=self.digest,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=reduced - planned,
            wait_seconds=planned - started,
            pseudo_grad_norm=norm,
            cause="" if is_committed else cause or "a vote is missing or differs",
        )

    def leave(self) -> None:
        """Say goodbye; nothing is waited for but the goodbye itself."""
        if self._network.membership is not None:
            self._loop.run(self._network.membership.leave(), timeout_seconds=5)

    # -- a round, step by step ------------------------------------------------------------------------------

    def _plan(self, tokens: int) -> Plan:
        """The plan, on every rank. When this island is behind, take the state and raise Behind."""
        body, donor, cause = self._team.on_leader(lambda: self._plan_on_leader(tokens))
        if body is not None:
            return parse(Plan, body)
        if donor is None:
            raise OuterError(cause)
        self._take_state(donor)
        self._announce()
        raise Behind(donor, cause)

    def _plan_on_leader(self, tokens: int) -> tuple[bytes | None, str | None, str]:
        """(plan, None, ""), or (None, donor, why) when behind, or (None, None, why) when there can be no plan."""
        ready = Ready(
            island=self._identity.island,
            incarnation=self._identity.incarnation,
            round=self.position.round,
            tokens=tokens,
            digest=self.digest,
            carriers=pack_carriers(self._held.exchange.carriers),
            epoch=self._attempts.epoch,
            transport_addresses=[transport for transport, _ in self._addresses],
            control_addresses=[control for _, control in self._addresses],
        )
        try:
            plan = self._loop.run(self._agree.plan(ready))
            return plan.model_dump_json().encode(), None, ""
        except Behind as behind:
            return None, behind.donor, behind.cause
        except OuterError as error:
            return None, None, str(error)

    def _reduce(
        self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, Mean], OuterError | None]:
        """The mean of this rank's parts, or why there is none."""
        try:
            return self._loop.run(self._attempts.run(plan, pseudo_grads)), None
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", *plan.key, error)
            return {}, error

    def _result(self, means: Mapping[int, Mean], failure: OuterError | None) -> tuple[str | None, str, bool]:
        """What the island votes: the digest of all ranks' means, or None, the cause, and whether it is our fault."""
        is_fatal = failure is not None and not isinstance(failure, TransportError)
        results = self._team.gather((is_fatal, None if failure is None else str(failure)))
        # Our own fault first: the other ranks have only heard of it.
        causes = [(not fatal, cause) for fatal, cause in results if cause is not None]
        if causes:
            is_foreign, cause = min(causes)
            return None, cause, not is_foreign
        return self._held.combine({index: mean.digest for index, mean in means.items()}), "", False

    def _commit(self, plan: Plan, means: Mapping[int, Mean]) -> None:
        tokens = self.position.tokens + sum(p.tokens for p in plan.participants)
        position = Position(round=plan.round + 1, tokens=tokens)
        self._held.commit({index: mean.values for index, mean in means.items()}, position)
        self._announce()

    def _announce(self) -> None:
        """Let others know where this island stands, and that it can be a donor."""
        if self._agreement is None:
            return
        self._agreement.round = self.position.round
        self._donor.describe(self.digest, self._held.exchange.carriers, self._held.space.fingerprint)
        member = Member(
            island=self._identity.island,
            incarnation=self._identity.incarnation,
            identity=self._identity.identity,
            config_hash=self._identity.config_hash,
            control_addresses=[control for _, control in self._addresses],
            transport_addresses=[transport for transport, _ in self._addresses],
            round=self.position.round,
        )
        self._loop.run(self._membership.announce(member))

    # -- another island's state -----------------------------------------------------------------------------

    def _find_donor(self, besides: str = "") -> str | None:
        """The island that is furthest, if any has committed a round."""
        members = self._loop.run(self._membership.members()).values()
        unfit = self._identity.island, besides
        ahead = [(m.round, m.island) for m in members if m.round > 0 and m.island not in unfit]
        return max(ahead)[1] if ahead else None

    def _take_state(self, donor: str) -> None:
        """Global state and local params become the donor's, or another's if it fails. Raises TransportError."""
        failures = []
        for _ in range(TAKE_STATE_TRIES):
            cause = self._try_to_take_state(donor)
            if cause is None:
                log.info("took the state of %s: round %d", donor, self.position.round)
                return
            log.warning("taking the state of %s failed: %s", donor, cause)
            failures.append(f"{donor}: {cause}")
            # Rounds may be shorter than a transfer: once this island is announced, the others wait for it.
            self._announce()
            time.sleep(TAKE_STATE_PAUSE_SECONDS)
            donor = self._team.on_leader(partial(self._find_donor, donor)) or donor
        raise TransportError("the state of no island could be taken: " + "; ".join(failures))

    def _try_to_take_state(self, donor: str) -> str | None:
        """None when it is done, else why not; the same on every rank."""
        member = self._team.on_leader(lambda: self._loop.run(self._membership.members()).get(donor))
        if member is None:
            return "it has left"
        description, parts, cause = None, {}, None
        try:
            fetch = fetch_state(self._network.messenger, member, self._held.space, self._held.exchange.carried)
            description, parts = self._loop.run(fetch)
        except TransportError as error:
            cause = str(error)
        results = self._team.gather((cause, description))
        causes = [c for c, _ in results if c is not None]
        if causes or description is None:
            return causes[0]
        if any(other != description for _, other in results):
            return "it committed a round meanwhile"
        self._held.replace(parts, description.position)
        return None if self.digest == description.digest else "its digest is not that of the bytes it sent"

    # -- plumbing -------------------------------------------------------------------------------------------

    def _build_agreement(self, config: OuterConfig) -> Agreement:
        rules = Rules(config.quorum, config.start_islands, len(self._held.space.parts))
        messenger, island = self._network.messenger, self._identity.island
        agreement = Agreement(island, rules, messenger, self._membership, self._deadlines)
        agreement.on_abort = self._attempts.note_no
        return agreement

    @property
    def _agree(self) -> Agreement:
        assert self._agreement is not None, "only the leader agrees with other islands"
        return self._agreement

    @property
    def _membership(self) -> Membership:
        assert self._network.membership is not None, "only the leader has a membership"
        return self._network.membership

    def _traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) over all ranks since it was asked last: peers send before we have the plan."""
        traffic = self._network.transport.traffic
        counts = self._team.gather((traffic.bytes_sent, traffic.bytes_received))
        before, self._counted = self._counted, (sum(sent for sent, _ in counts), sum(got for _, got in counts))
        return self._counted[0] - before[0], self._counted[1] - before[1]
