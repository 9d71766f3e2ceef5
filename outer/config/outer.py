"""Settings for when islands average, over which network, and which islands take part."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from outer.config.networks import NETWORKS, NetworkFacts
from outer.config.optimizer import OuterOptimizerConfig
from outer.config.own_code import is_import_path, one_of
from outer.config.section import Section
from outer.config.sharing import CodingConfig, ExpertSharingConfig, GossipConfig, MergeConfig

BETWEEN_RULES = ("mean", "trimmed_mean", "geometric_median")
"""Rules whose result lies between the participants' values, which second moments and buffers
require.
"""
GATHERED = ("topk",)
"""Our codecs that cannot encode a mean: every island gets all payloads and computes the mean
itself."""
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk", "lowrank")
MAX_SECONDS = 30 * 86400.0
"""Longest wait and longest round of a run. It protects joiners, whose config may come from a
swarm."""
MAX_TLS_STREAMS = 16
"""Limit for the connections on which a rank sends to a rank of another island, over tls."""

GOSSIP_REFUSES = (
    "wait_for",
    "fragments",
    "delay",
    "mix",
    "eager",
    "local_steps",
    "optimizer",
    "moments",
    "merge",
    "experts",
    "quorum",
    "below_quorum",
    "missed_progress",
    "audit",
)
"""Settings that apply only to rounds of all islands. Gossip rejects them."""


class OuterConfig(Section):
    """The outer loop: when islands average, how they encode pseudo-gradients, and which islands
    must take part.
    """

    rounds: int = Field(default=100, ge=1)
    """Number of times that every parameter is averaged, except experts with `experts.every` above
    1. The run has rounds x inner_steps inner steps.
    """
    inner_steps: int = Field(default=30, ge=1)
    """Number of inner steps from one average of a parameter to the next (H)."""
    fragments: int = Field(default=1, ge=1)
    """Number of sets of parameters that are averaged in turn. Each set is averaged once per
    `inner_steps` steps, at an offset of its own (2501.18512)."""
    fragment_pattern: Literal["strided", "sequential", "balanced"] = "strided"
    """Layers of a fragment: every n-th layer (strided), neighbouring layers (sequential), or a
    choice that makes fragments about equal in size (balanced)."""
    delay: int = Field(default=0, ge=0)
    """Number of inner steps between the start of a round and the merge of its result (tau of
    2501.18512).
    """
    mix: float = Field(default=0.0, ge=0, le=1)
    """Weight of the island's own params when the result of a round is merged into them (alpha of
    2501.18512).
    """
    eager: bool = False
    """While a round is in flight, continue from params that already include this island's own
    contribution (2502.12996)."""
    moments: tuple[PositiveInt, PositiveInt] | None = None
    """[u, v]: also average the inner AdamW's first moments every u-th time that params are
    averaged, and its second moments every v-th time. null: never average moments. [3, 6] is
    DES-LOC (2505.22549), [1, 1] is Local Adam. Moments are sent in fp32 if `codec` is fp32,
    otherwise in bf16."""
    local_steps: Literal["fixed", "dynamic", "timed"] = "fixed"
    """Number of inner steps that an island makes per round. fixed: the same number on every
    island. dynamic: a slower island makes fewer, in proportion to its measured speed. timed: as
    many as fit into `round_seconds` (A-EDiT, 2412.07210), at least one and at most the number in
    the schedule. The learning rate and the length of the run always follow the schedule."""
    round_seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """For local_steps timed: duration of a round's inner steps in seconds, from the start of the
    first one, without waits for others."""
    optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    merge: MergeConfig = MergeConfig()
    experts: ExpertSharingConfig = ExpertSharingConfig()
    gossip: GossipConfig | None = None
    """Average with a few islands in turn instead of with all. null: rounds of all islands."""
    audit: float = Field(default=0.0, ge=0, le=1)
    """Probability that another island recomputes the mean of a part in a round and compares it
    with the reducer's. See docs/decisions/0024-reducers-are-audited.md. 0 costs nothing, and
    trusts each island with the parts that it reduces."""
    codec: Annotated[str, one_of(CODECS, "my_package.codecs:Sign")] = "fp32"
    """Encoding of pseudo-gradients on the network: fp32, bf16, fp16, int8, int4, e3m0, stat2, topk
    or lowrank, or a codec of your own by its import path (docs/extending.md).
    """
    coding: CodingConfig = CodingConfig()
    transport: Literal["loopback", "gloo", "tls", "hivemind"] = "hivemind"
    """Network between islands: threads of one process (loopback), plain TCP (gloo), TLS 1.3 on
    connections of our own (tls), or encrypted libp2p (hivemind).
    """
    part_elements: int | None = Field(default=None, ge=256)
    """Size of the largest part, in parameters. null: chosen by the size of the model: 1M below
    1B parameters, 2M to 4M above. All islands use the same size, so codec blocks do not depend
    on a mesh."""
    quorum: int = Field(default=1, ge=1)
    """Smallest number of participants for a round to count. With `wait_for: quorum`, the
    smallest number of contributors."""
    wait_for: Literal["all", "quorum"] = "all"
    """Islands that a round waits for: all, or only `quorum` of them. With quorum, the other
    islands observe the round: they keep training, contribute nothing, and receive its result."""
    below_quorum: Literal["wait", "continue", "stop"] = "wait"
    """What to do with fewer participants than `quorum`: wait for more, continue with a warning
    each round, or stop this island."""
    missed_progress: Literal["rebase", "drop"] = "rebase"
    """What to do with the progress of an island that missed one commit: re-base it on the state
    that the island downloads, or drop it. After several missed commits it is always dropped."""
    start_islands: int = Field(default=1, ge=1)
    """Number of islands that must have joined before the first round is planned."""
    wait_seconds: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """Longest wait for other islands, in seconds, until waits have been measured. After that,
    deadlines follow the measurements."""

    @model_validator(mode="after")
    def _fits(self) -> "OuterConfig":
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"fragments is {self.fragments}, inner_steps {self.inner_steps}: each fragment is "
                "sent at a step of its own; lower fragments or raise inner_steps"
            )
        between = self.inner_steps // self.fragments
        if self.delay > between:
            raise ValueError(
                f"delay is {self.delay}, but there are only {between} inner steps (inner_steps / "
                "fragments) from one round to the next, and only one round is in flight at a time; "
                f"set delay to {between} or less"
            )
        if self.eager and (self.delay == 0 or self.mix > 0):
            raise ValueError(
                "eager requires rounds that run during training and are not mixed: set delay to 1 "
                f"or more and mix to 0 (delay is {self.delay}, mix {self.mix})"
            )
        if self.eager and self.optimizer.delayed:
            raise ValueError(
                "eager anticipates a whole outer step, but optimizer.delayed makes it in shares; "
                "set one to false"
            )
        if self.wait_for == "quorum" and (self.delay > 0 or self.mix > 0):
            raise ValueError(
                "wait_for is 'quorum': observers keep training during a round, and contributors "
                "wait for its result; set delay and mix to 0, or wait_for to all (delay is "
                f"{self.delay}, mix {self.mix})"
            )
        self._check_own_code()
        self._check_gossip()
        self._check_timed()
        self._check_histories()
        self._check_audit()
        self._check_experts()
        if self.moments is not None:
            self._check_moments()
        return self

    def _check_own_code(self) -> None:
        if self.coding.options and not is_import_path(self.codec):
            raise ValueError(
                "coding.options are for a codec of your own by import path, but codec is "
                f"{self.codec}; leave them out"
            )

    def _check_moments(self) -> None:
        if self.eager:
            raise ValueError(
                "eager rounds do not send moments, because an island's own share does not "
                "anticipate their mean; set "
                "eager to false or moments to null"
            )
        if self.wait_for == "quorum":
            raise ValueError(
                "moments are averaged by rounds of all islands, because an observer's own steps "
                "cannot be re-based on averaged moments; set wait_for to all or moments to null"
            )
        if self.optimizer.delayed:
            raise ValueError(
                "moments are averaged in one step, but optimizer.delayed applies what it receives "
                "in shares; set optimizer.delayed to false or moments to null"
            )
        if self.merge.rule not in BETWEEN_RULES:
            raise ValueError(
                f"moments cannot be merged by {self.merge.rule}, which is for pseudo-gradients "
                "only; set merge.rule to "
                f"{', '.join(BETWEEN_RULES[:-1])} or {BETWEEN_RULES[-1]}, or moments to null"
            )

    def _check_gossip(self) -> None:
        fields = type(self).model_fields
        found = [name for name in GOSSIP_REFUSES if getattr(self, name) != fields[name].default]
        found += ["coding.feedback"] if self.coding.feedback is not None else []
        if found and self.gossip is not None:
            raise ValueError(
                "gossip has no rounds of all islands, and has its own momentum and lr: leave out "
                f"{', '.join(found)}, or set gossip to null"
            )

    def _check_timed(self) -> None:
        if (self.local_steps == "timed") != (self.round_seconds is not None):
            raise ValueError(
                "local_steps 'timed' and round_seconds go together: set both or neither "
                f"(local_steps is {self.local_steps!r}, round_seconds {self.round_seconds})"
            )
        if self.local_steps == "timed" and self.wait_for == "quorum":
            raise ValueError(
                "wait_for is 'quorum': each island contributes when its inner steps are done, at "
                "its own pace; set "
                "local_steps to dynamic and leave out round_seconds, or wait_for to all"
            )

    def _check_histories(self) -> None:
        if self.codec in GATHERED and (problem := self.gathering_problem):
            raise ValueError(problem)

    def _check_audit(self) -> None:
        remembering = [f"merge.{name}" for name in self.merge.remembering]
        remembering += ["coding.feedback"] if self.coding.feedback is not None else []
        if self.audit > 0 and remembering:
            raise ValueError(
                f"audit is {self.audit:g}, and a mean that is audited must follow from the round's "
                f"payloads alone; {remembering[0]} makes it depend on what its reducer remembers "
                "of earlier rounds; leave that out, or set audit to 0"
            )

    def _check_experts(self) -> None:
        every = self.experts.every
        if self.rounds % every:
            raise ValueError(
                f"experts.every is {every}, which does not divide rounds ({self.rounds}): the "
                "experts' last steps would never be averaged; set rounds to a multiple of it, such "
                f"as {-(-self.rounds // every) * every}"
            )
        if self.experts.group > 1 and self.merge.experts != "routed":
            raise ValueError(
                f"experts.group is {self.experts.group}, which is for weights by routed tokens; "
                "set merge.experts to routed, or leave experts.group out"
            )
        if every > 1 and self.wait_for == "quorum":
            raise ValueError(
                f"experts.every is {every}, but with wait_for 'quorum' the number of rounds is not "
                "known beforehand, and the last one might leave the experts out; set experts.every "
                "to 1, or wait_for to all"
            )
        if every > 1 and self.merge.needs_last_mean:
            raise ValueError(
                f"experts.every is {every}, and merge.rule centered_clip and merge.min_cosine "
                "compare a mean with that "
                "of the round before, which has no experts; set experts.every to 1, or leave them "
                "out"
            )
        if self.moments is not None and (every > 1 or self.merge.experts == "routed"):
            raise ValueError(
                "moments are averaged with the weights and in the rounds of all other params; set "
                "merge.experts to tokens and experts.every to 1, or moments to null"
            )

    @property
    def network(self) -> NetworkFacts:
        """The facts of the network between islands."""
        return NETWORKS[self.transport]

    @property
    def gathering_problem(self) -> str:
        """Return why the codec must not be one that cannot encode a mean; empty if it may be
        one.
        """
        remembering = self.merge.remembering
        if not remembering:
            return ""
        return (
            f"merge.{remembering[0]}: with codec {self.codec} every island computes the means "
            "itself, and one that joined later remembers other rounds than the others; leave it "
            "out (max_norm_ratio remembers nothing), or use another codec"
        )

    @property
    def later_defaults(self) -> dict[str, set[str] | bool]:
        """Settings that were added later and still have their defaults, by section. Hashes leave
        them out, so that they stay as before.
        """
        unset = {
            "coding": {"options"} if not self.coding.options else set(),
            "merge": self.merge.later_defaults,
            "optimizer": self.optimizer.later_defaults,
        }
        found: dict[str, set[str] | bool] = {
            section: names for section, names in unset.items() if names
        }
        return found | ({"experts": True} if self.experts == ExpertSharingConfig() else {})

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the protocol. Each round averages one fragment."""
        return self.rounds * self.fragments

    @property
    def is_plain(self) -> bool:
        """Whether local params equal the global params after every round."""
        is_whole = self.fragments == 1 and self.experts.every == 1
        return is_whole and self.delay == 0 and self.mix == 0 and self.wait_for == "all"
