"""The fault specifications of `diloco simulate --fault`, parsed. torch is imported only when a spec
names a phase.

KIND:TARGET@WHEN,OPTION=VALUE      for example kill:1@round=3,back=5
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from outer.hooks import Phase

FaultKind = Literal[
    "kill", "freeze", "cut", "slow", "corrupt", "nan", "poison", "join", "leave", "forget"
]
BOOTSTRAP: "Service" = "bootstrap"
DAEMON = "daemon"
AGENT = "agent"
"""torchrun's process on a node, which starts and watches the node's ranks."""
Service = Literal["bootstrap", "relay0", "relay1"]
Target = int | Service
"""An island's index, or a process that serves the islands."""
RELAYS: tuple[Service, ...] = ("relay0", "relay1")
"""The relays of islands that other islands cannot reach directly."""
SERVICES: tuple[Service, ...] = (BOOTSTRAP, *RELAYS)

TRIGGERS = ("round", "step", "second")
OPTIONS: dict[FaultKind, tuple[str, ...]] = {
    "kill": (*TRIGGERS, "phase", "process", "node", "back"),
    "freeze": (*TRIGGERS, "phase", "process", "node", "seconds"),
    "cut": (*TRIGGERS, "node", "seconds"),
    "slow": (*TRIGGERS, "seconds"),
    "corrupt": TRIGGERS,
    "nan": ("round",),
    "poison": ("round", "rounds"),
    "join": TRIGGERS,
    "leave": (*TRIGGERS, "back"),
    "forget": TRIGGERS,
}
EXAMPLES: dict[FaultKind, str] = {
    "kill": "kill:1@round=3,back=5",
    "freeze": "freeze:1@round=3,seconds=20",
    "cut": "cut:0-1@step=40,seconds=15",
    "slow": "slow:2x3",
    "corrupt": "corrupt:1@round=4",
    "nan": "nan:1@round=4",
    "poison": "poison:1@round=5,rounds=1",
    "join": "join:@round=4",
    "leave": "leave:1@round=6",
    "forget": "forget:1@round=4",
}
SECONDS: dict[str, float] = {"freeze": 20.0, "cut": 15.0, "slow": 10.0}
"""Default duration in seconds of each kind of fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    It strikes when its target begins `round`, has made `step` inner steps, or at `second`.
    `targets` is empty for a join. `other_side` is empty except for a cut.
    """

    kind: FaultKind
    targets: tuple[Target, ...] = ()
    other_side: tuple[Target, ...] = ()
    factor: float | None = None
    round: int | None = None
    step: int | None = None
    second: float | None = None
    """Seconds since the run's first commit."""
    phase: "Phase | None" = None
    process: str | None = None
    """The island's only process that is hit: rank0, rank1, ..., DAEMON, AGENT; None means all."""
    node: int | None = None
    """The only node of the island that is hit. A cut separates it from the other nodes."""
    seconds: float | None = None
    back: float | None = None
    rounds: int | None = None

    def __str__(self) -> str:
        """Return the spec, as written on the command line."""
        targets = "-".join(
            "+".join(map(str, side)) for side in (self.targets, self.other_side) if side
        )
        names = (*TRIGGERS, "phase", "process", "node", "seconds", "back", "rounds")
        values = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        options = ",".join(f"{name}={format_value(value)}" for name, value in values)
        factor = "" if self.factor is None else f"x{self.factor:g}"
        return f"{self.kind}:{targets}{factor}" + (
            f"@{options}" if self.kind != "slow" or options else ""
        )

    @property
    def part(self) -> str | None:
        """Name for `find_process`: rank1, node1, agent1 or daemon1; None means the whole island."""
        if self.node is None:
            return self.process
        return f"{self.process or 'node'}{self.node}"

    @property
    def has_trigger(self) -> bool:
        """Whether the fault waits for a trigger. Without one it is active from the start."""
        return any(getattr(self, name) is not None for name in TRIGGERS)

    @property
    def is_self_inflicted(self) -> bool:
        """Whether the island inflicts the fault on itself, by its config."""
        at_round = self.kind in ("nan", "poison") or (
            self.kind == "corrupt" and self.round is not None
        )
        return at_round or self.phase is not None or (self.kind == "slow" and not self.has_trigger)


def format_value(value: float | str) -> str:
    """Return the value as text, whole floats without their `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@lru_cache(maxsize=4096)
def parse_fault(text: str) -> Fault:
    """Parse one spec. Raises ConfigError with the problem, the allowed values and an example."""
    kind, colon, rest = text.partition(":")
    if kind not in EXAMPLES:
        near = difflib.get_close_matches(kind, EXAMPLES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise invalid(text, f"unknown kind {kind!r}; {hint}kinds: {', '.join(EXAMPLES)}")
    if not colon:
        raise invalid(text, f"a ':' must follow {kind!r}", kind)
    names, _, options = rest.partition("@")
    targets, other_side, factor = parse_targets(text, kind, names)
    values = parse_options(text, kind, options)
    fault = Fault(kind=kind, targets=targets, other_side=other_side, factor=factor, **values)
    check_options(text, fault)
    return fault


def parse_targets(
    text: str, kind: FaultKind, names: str
) -> tuple[tuple[Target, ...], tuple[Target, ...], float | None]:
    """Parse the targets, the other side of a cut, and the factor of a slowdown."""
    if kind == "join":
        if names:
            raise invalid(
                text, f"got {names!r} before '@'; a join names no island, it adds one", kind
            )
        return (), (), None
    if kind == "cut":
        first, dash, second = names.partition("-")
        sides = (
            parse_target_group(text, kind, first),
            parse_target_group(text, kind, second) if dash else (),
        )
        both = set(sides[0]) & set(sides[1])
        if both:
            raise invalid(text, f"{min(map(str, both))} is on both sides", kind)
        return *sides, None
    if kind == "slow":
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", names)
        if match is None or float(match[2]) <= 1:
            raise invalid(
                text, f"got {names!r}; allowed: an island, 'x' and a number above 1", kind
            )
        return (int(match[1]),), (), float(match[2])
    targets = parse_target_group(text, kind, names)
    if (len(targets) > 1 and kind != "kill") or (
        set(targets) & set(SERVICES) and kind not in ("kill", "freeze")
    ):
        allowed = "one island" + (
            f", or {', '.join(SERVICES)}" if kind in ("kill", "freeze") else ""
        )
        raise invalid(text, f"got {names!r}; allowed: {allowed}", kind)
    return targets, (), None


def parse_target_group(text: str, kind: FaultKind, group: str) -> tuple[Target, ...]:
    """Parse targets that are joined by '+', without duplicates."""
    names = group.split("+")
    for name in names:
        if not name.isdecimal() and name not in SERVICES:
            allowed = f"its index (0, 1, ...), or {', '.join(SERVICES)}"
            raise invalid(text, f"got {name!r} for an island; allowed: {allowed}", kind)
    services: dict[str, Target] = {service: service for service in SERVICES}
    return tuple(dict.fromkeys(services[name] if name in services else int(name) for name in names))


def parse_options(text: str, kind: FaultKind, options: str) -> dict[str, Any]:
    """Parse the options after '@', each checked on its own."""
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if name not in OPTIONS[kind]:
            near = difflib.get_close_matches(name, OPTIONS[kind], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise invalid(
                text,
                f"unknown option {name!r}; {hint}options of {kind}: {', '.join(OPTIONS[kind])}",
                kind,
            )
        if not equals or name in values:
            raise invalid(text, f"{name!r} must be given a value, once", kind)
        values[name] = parse_value(text, kind, name, value)
    if kind in SECONDS and (kind != "slow" or values):
        values.setdefault("seconds", SECONDS[kind])
    return values


def parse_value(text: str, kind: FaultKind, name: str, value: str) -> int | float | str:
    """Parse the value of one option. Raises ConfigError."""
    if name == "phase":
        from outer.hooks import PHASES

        if value not in PHASES:
            near = difflib.get_close_matches(value, PHASES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise invalid(text, f"unknown phase {value!r}; {hint}phases: {', '.join(PHASES)}", kind)
        return value
    if name == "process":
        if not re.fullmatch(rf"rank\d+|{DAEMON}|{AGENT}", value):
            raise invalid(
                text,
                f"process: got {value!r}; allowed: rank0, rank1, ..., {DAEMON} or {AGENT}",
                kind,
            )
        return value
    if name in ("round", "step", "rounds", "node"):
        least = 0 if name in ("round", "node") else 1
        if not value.isdecimal() or int(value) < least:
            raise invalid(
                text, f"{name}: got {value!r}; allowed: a whole number from {least} on", kind
            )
        return int(value)
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise invalid(text, f"{name}: got {value!r}; allowed: a number of seconds", kind)
    return float(value)


def check_options(text: str, fault: Fault) -> None:
    """Raise ConfigError unless the fault's options are compatible with each other."""
    given = [name for name in TRIGGERS if getattr(fault, name) is not None]
    allowed = [name for name in TRIGGERS if name in OPTIONS[fault.kind]]
    if len(given) > 1:
        raise invalid(
            text, f"got {' and '.join(given)}; it can wait for one of them only", fault.kind
        )
    if not given and fault.kind != "slow":
        raise invalid(
            text,
            f"it does not say when; add {' or '.join(f'@{name}=N' for name in allowed)}",
            fault.kind,
        )
    hits_service = any(isinstance(target, str) for target in fault.targets)
    if (
        len(fault.targets) > 1
        and fault.kind == "kill"
        and (fault.phase or fault.process or fault.node is not None)
    ):
        raise invalid(text, "a phase, process or node belongs to one island; name one", fault.kind)
    if fault.phase is not None and (fault.round is None or hits_service):
        raise invalid(
            text,
            "a phase belongs to the round of an island: name the island and @round=N,phase=...",
            fault.kind,
        )

    if fault.process is not None and (fault.phase is not None or hits_service):
        raise invalid(
            text,
            "a process belongs to an island, and a phase already determines the process; leave out "
            "process",
            fault.kind,
        )
    check_node(text, fault)


def check_node(text: str, fault: Fault) -> None:
    """Raise ConfigError unless the fault's node fits its other options."""
    if fault.process == AGENT and fault.node is None:
        raise invalid(text, f"process={AGENT}: each node has one; add node=N", fault.kind)
    if fault.node is None:
        return
    if fault.process not in (None, AGENT, DAEMON):
        raise invalid(
            text,
            f"{fault.process} is one process wherever it runs; leave out node or process",
            fault.kind,
        )
    if (
        fault.phase is not None
        or len(fault.targets) != 1
        or isinstance(fault.targets[0], str)
        or fault.other_side
    ):
        raise invalid(
            text,
            "a node belongs to a single island, and goes with no phase; for example "
            "cut:0@round=2,node=1",
            fault.kind,
        )


def check_nodes_of(faults: Iterable[Fault], num_nodes: int) -> None:
    """Raise ConfigError if a fault hits a node that islands of `num_nodes` nodes do not have."""
    for fault in faults:
        if fault.node is not None and (num_nodes == 1 or fault.node >= num_nodes):
            has = "one node each" if num_nodes == 1 else f"the nodes 0 to {num_nodes - 1}"
            raise invalid(str(fault), f"the islands have {has}; see --nodes", fault.kind)


def invalid(text: str, problem: str, kind: FaultKind = "kill") -> ConfigError:
    """Build the error for an invalid spec, with an example of the kind."""
    return ConfigError(f"--fault {text!r}: {problem}; for example {EXAMPLES[kind]}")


def check_processes(faults: Iterable[Fault], num_ranks: Sequence[int], *, has_daemon: bool) -> None:
    """Raise ConfigError if a fault hits a process that its island does not have."""
    for fault in faults:
        if fault.process == DAEMON and not has_daemon:
            raise invalid(str(fault), "only islands over hivemind have a libp2p daemon", fault.kind)
        if fault.process not in (None, DAEMON, AGENT) and isinstance(
            island := fault.targets[0], int
        ):
            most = num_ranks[min(island, len(num_ranks) - 1)] - 1
            if int(fault.process.removeprefix("rank")) > most:
                raise invalid(
                    str(fault), f"island {island} has the ranks 0 to {most} only", fault.kind
                )


def check_targets(
    faults: Iterable[Fault],
    num_islands: int,
    *,
    has_bootstrap: bool,
    nat: Sequence[int] = (),
    has_relays: bool = False,
) -> None:
    """Raise ConfigError if a fault targets an island or process that will not exist. Each join adds
    one island.

    `nat`: the islands behind a NAT.
    """
    faults = list(faults)
    there = num_islands + sum(fault.kind == "join" for fault in faults)
    for fault in faults:
        for name in (*fault.targets, *fault.other_side):
            if name == BOOTSTRAP and not has_bootstrap:
                raise invalid(
                    str(fault), "a run over loopback has no bootstrap process", fault.kind
                )
            if name in RELAYS and not has_relays:
                raise invalid(
                    str(fault), "there are relays only for islands of --nat or --proxy", fault.kind
                )
            if fault.kind == "forget" and name not in nat:
                raise invalid(str(fault), f"island {name} is behind no NAT; see --nat", fault.kind)
            if isinstance(name, int) and name >= there:
                raise invalid(
                    str(fault), f"there is no island {name}; allowed: 0 to {there - 1}", fault.kind
                )
