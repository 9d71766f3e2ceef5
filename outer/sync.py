"""The outer loop of one island: begin or join, then a round after every `inner_steps` inner steps.

    gather local params -> pseudo-gradient -> plan -> reduce -> vote -> commit: outer step, write back
                                               ^________________|  abort: nothing changed, next attempt

Every rank of the island makes the same calls in the same order; the leader speaks to other islands.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from outer.agreement import Agreement, Interruption
from outer.attempt import Attempts
from outer.codecs import build_codec
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.donor import Donor
from outer.errors import BehindError, OuterError, PoisonError, TransportError
from outer.exchange import Params
from outer.island_state import IslandState
from outer.loop import LoopThread
from outer.network import Network
from outer.pace import Pace
from outer.parts_cache import PartsCache
from outer.presence import Identity, Presence, standing_of
from outer.protocol import Protocol
from outer.reduce import Mean, Reducer
from outer.reports import CaughtUp, RoundReport, Settings
from outer.rounds import Plan, no, parse, yes
from outer.state import Position
from outer.taking import Taken, Taker
from outer.team import Team
from outer.transfer import Fetch, Share
from outer.transports.base import Endpoint
from outer.verdicts import Rules

log = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long an island that has the last round stays for those that live and do not have it yet."""
DONOR_WAIT_SECONDS = 10.0
"""How long an island that must not begin a run waits for one that can give a state."""


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
        settings: Settings | None = None,
    ) -> None:
        self._config, self._identity, self._settings = config, identity, settings or Settings()
        self._team, self._network, self._loop = team, network, loop
        self._hooks = self._settings.hooks
        self._codec = build_codec(config.codec)
        self._held = IslandState(config, self._codec.block_elements, params, team)
        self._deadlines = Deadlines(config.wait_seconds)
        self.pace = Pace(config, identity.island, self._deadlines)
        me = Endpoint(identity.island, team.rank)
        self._reducer = Reducer(network.transport, self._codec, self._held.space, me, self._hooks, config.merge)
        self._counted = 0, 0
        self._attempts = Attempts(network.transport, self._reducer, self._deadlines)
        self._donor = Donor(self._held.mine, network.messenger, self._hooks)
        addresses = team.gather((network.transport.address, network.messenger.address))
        self._presence = self._build_presence(addresses) if team.is_leader else None
        if self._presence is None:
            network.messenger.serve("vote", self._attempts.on_vote)
        self._taker = Taker(self._held, self._fetch, team, loop, lambda: self._leader.find_donors())
        self._has_entered_late = False

    @property
    def position(self) -> Position:
        """Where the run stands, as far as this island knows."""
        return self._held.mine.position

    @property
    def digest(self) -> str:
        """Of the global params and outer momentum that this island holds."""
        return self._held.digest

    # -- an island's life -------------------------------------------------------------------------------------

    def begin(self) -> Position:
        """Enter the run: with the islands' state if they have committed a round, else from the start with them."""
        if self._presence is not None:
            self._presence.announce()
        if self._team.on_leader(self._has_donors):
            self._take_state()
        elif self._settings.joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        self._stand(is_coming=True)
        return self.position

    def attempt(self, tokens: int) -> RoundReport:
        """One attempt at the round, with the island's progress since the last commit, made on `tokens` tokens.

        Not committed means that nothing has changed, on any island: call it again at once. Raises CaughtUp when
        others have committed without this island; OuterError when its own pseudo-gradient cannot be used, or too
        few islands come.
        """
        started = time.monotonic()
        pseudo_grads, norm = self._held.pseudo_grads()
        plan = self._plan(tokens, pseudo_grads)
        planned = time.monotonic()
        means, failure = self._reduce(plan, pseudo_grads)
        digest, cause, fault = self._result(means, failure)
        reduced = time.monotonic()
        is_committed = self._team.on_leader(lambda: self._decide(plan, digest, cause, fault))
        if is_committed:
            self._deadlines.observe("reduce", reduced - planned)
            self._commit(plan, means)
        else:
            self._loop.run(self._attempts.drop())
        if fault == self._identity.island:
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
            gated=dict(self._reducer.gated),
            cause="" if is_committed else cause or "a vote is missing or differs",
        )

    def interruption(self, steps_left: int) -> Interruption:
        """Why inner steps should end now, the same on every rank; "": go on. Call it after each inner step."""
        seconds, late = steps_left * self.pace.step_seconds, self._has_entered_late
        return self._team.on_leader(lambda: self._leader.interruption(seconds, entered_late=late))

    def finish(self) -> None:
        """The run is over: stay until the others have the last round, take it from them if this one has not."""
        try:
            if self._team.on_leader(lambda: self._leader.linger(FINISH_SECONDS)):
                self._take_state()
        except TransportError as error:
            log.warning("the others end with another state than this island, and it cannot be taken: %s", error)
        self.leave()

    def leave(self, steps: int = 0) -> None:
        """Say goodbye, `steps` inner steps into the round; only the goodbye itself is waited for."""
        if self._presence is not None:
            self._presence.leave(steps)

    # -- a round, step by step ------------------------------------------------------------------------------

    def _plan(self, tokens: int, pseudo_grads: Mapping[int, torch.Tensor]) -> Plan:
        """The plan, on every rank. When this island is behind, take the state and raise CaughtUp."""
        self._hooks.reached("plan", self.position.round)
        body, is_behind, cause = self._team.on_leader(lambda: self._plan_on_leader(tokens))
        if body is not None:
            return parse(Plan, body)
        if not is_behind:
            raise OuterError(cause)
        is_kept = self._catch_up(pseudo_grads, tokens)
        raise CaughtUp(cause, is_kept=is_kept)

    def _plan_on_leader(self, tokens: int) -> tuple[bytes | None, bool, str]:
        """(plan, False, ""), or (None, True, why) when behind, or (None, False, why) when there can be no plan."""
        ready = self._leader.ready(tokens, self._attempts.epoch, self.pace.step_seconds)
        try:
            told = partial(self._hooks.reached, "planning", ready.round)
            plan = self._loop.run(self._leader.agreement.plan(ready, told))
            return plan.model_dump_json().encode(), False, ""
        except BehindError as behind:
            return None, True, behind.cause
        except OuterError as error:
            return None, False, str(error)

    def _reduce(
        self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, Mean], OuterError | None]:
        """The mean of this rank's parts, or why there is none."""
        self._donor.is_busy = True
        try:
            return self._loop.run(self._attempts.run(plan, pseudo_grads)), None
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", plan.round, plan.attempt, error)
            return {}, error
        finally:
            self._donor.is_busy = False

    def _result(self, means: Mapping[int, Mean], failure: OuterError | None) -> tuple[str | None, str, str | None]:
        """What the island votes: the digest of all ranks' means, or None, the cause, and whose fault it is."""
        fault = None
        if isinstance(failure, PoisonError):
            fault = failure.peer
        elif failure is not None and not isinstance(failure, TransportError):
            fault = self._identity.island
        results = self._team.gather((None if failure is None else str(failure), fault))
        failed = [(cause, fault) for cause, fault in results if cause is not None]
        if failed:
            # Our own fault first, then a peer's: the other ranks have only heard of it.
            ours = self._identity.island
            cause, fault = min(failed, key=lambda f: (f[1] != ours, f[1] is None))
            if fault is not None and fault != ours:
                self._network.refusals.add(fault, "payload", cause)
            return None, cause, fault
        return self._held.combine({index: mean.digest for index, mean in means.items()}), "", None

    def _decide(self, plan: Plan, digest: str | None, cause: str, fault: str | None) -> bool:
        """Whether the attempt commits, on the leader."""
        self._hooks.reached("vote", plan.round)
        me = self._identity.island
        vote = yes(plan, me, digest) if digest is not None else no(plan, me, cause, fault if fault != me else None)
        return self._loop.run(self._leader.agreement.decide(vote, partial(self._hooks.reached, "decide", plan.round)))

    def _commit(self, plan: Plan, means: Mapping[int, Mean]) -> None:
        self._hooks.reached("apply", plan.round)
        tokens = self.position.tokens + sum(p.tokens for p in plan.participants)
        position = Position(round=plan.round + 1, tokens=tokens)
        self._held.commit(means, position, partial(self._hooks.reached, "applied", plan.round))
        self._reducer.remember(plan.round, means)
        self._has_entered_late = False
        self.pace.observe_commit(plan)
        self._stand(is_coming=True, included=[p.incarnation for p in plan.participants])

    def _stand(self, *, is_coming: bool, included: Sequence[str] | None = None) -> None:
        """Tell the others where this island stands; with `included` also that it can give a new state."""
        if self._presence is not None:
            if included is not None:
                self._presence.offer(self._donor, included)
            self._presence.stand(is_coming=is_coming, step_seconds=self.pace.step_seconds)

    # -- another island's state -----------------------------------------------------------------------------

    def _has_donors(self) -> bool:
        """Whether any island has committed a round; waited for when this one must not begin a run."""
        deadline = time.monotonic() + (DONOR_WAIT_SECONDS if self._settings.joins else 0.0)
        while not (found := self._leader.find_donors()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return bool(found)

    def _catch_up(self, pseudo_grads: Mapping[int, torch.Tensor], tokens: int) -> bool:
        """Take the state that survives; whether this island's progress was put on top of it.

        It is, when exactly one commit was missed, of this island's own history, and that commit does not contain it
        already. What is re-based once and misses a commit again is dropped.
        """
        digest = self.digest
        taken = self._take_state()
        is_kept = (
            self._config.missed_progress == "rebase"
            and taken.base_digest == digest
            and self._identity.incarnation not in taken.description.included
            and 2 * tokens <= self._settings.max_tokens
        )
        if is_kept:
            self._held.rebase(pseudo_grads)
        self._stand(is_coming=True)
        return is_kept

    def _take_state(self) -> Taken:
        """The state of others, in the place of this island's. Raises TransportError."""
        self._stand(is_coming=False)
        taken = self._taker.take()
        self._has_entered_late = True
        self.pace.interrupt()
        self._stand(is_coming=False, included=taken.description.included)
        return taken

    def _fetch(self) -> Fetch:
        folder, held = self._settings.cache_dir, self._held
        cache = None
        if folder is not None:
            run = self._identity.config_hash
            cache = PartsCache(folder / f"rank-{self._team.rank}", held.space.fingerprint, run)
        share = Share(held.space, held.exchange.carried, self._codec, self._config.optimizer)
        return Fetch(self._network.messenger, [], share, cache, self._hooks)

    # -- plumbing -------------------------------------------------------------------------------------------

    def _build_presence(self, addresses: Sequence[tuple[str, str]]) -> Presence:
        config, identity, membership = self._config, self._identity, self._network.membership
        assert membership is not None, "the leader has a membership"
        rules = Rules(
            quorum=config.quorum,
            start_islands=config.start_islands,
            below_quorum=config.below_quorum,
            num_parts=len(self._held.space.parts),
            max_tokens=self._settings.max_tokens,
            max_round=config.rounds,
        )
        protocol = Protocol(identity.island, rules, standing_of(self._held, is_coming=False))
        messenger = self._network.messenger
        agreement = Agreement(protocol, messenger, membership, self._deadlines, identity.config_hash)
        agreement.on_no = self._attempts.note_no
        return Presence(identity, addresses, self._held, agreement, membership, self._loop)

    @property
    def _leader(self) -> Presence:
        assert self._presence is not None, "only the leader speaks for the island"
        return self._presence

    def _traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) over all ranks since it was asked last: peers send before we have the plan."""
        traffic = self._network.transport.traffic
        counts = self._team.gather((traffic.bytes_sent, traffic.bytes_received))
        before, self._counted = self._counted, (sum(sent for sent, _ in counts), sum(got for _, got in counts))
        return self._counted[0] - before[0], self._counted[1] - before[1]
