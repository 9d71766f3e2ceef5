"""Faults as `diloco simulate --fault` writes them. No torch here, unless a phase of a round is named.

KIND:WHO@WHEN,OPTION=VALUE      for example kill:1@round=3,back=5
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from diloco.config import ConfigError

if TYPE_CHECKING:
    from outer.phases import Phase

Kind = Literal["kill", "freeze", "cut", "slow", "corrupt", "nan", "poison", "join", "leave"]
BOOTSTRAP = "bootstrap"
Who = int | Literal["bootstrap"]
"""An island's index, or the bootstrap process."""

TRIGGERS = ("round", "step", "second")
OPTIONS: dict[Kind, tuple[str, ...]] = {
    "kill": (*TRIGGERS, "phase", "back"),
    "freeze": (*TRIGGERS, "phase", "seconds"),
    "cut": (*TRIGGERS, "seconds"),
    "slow": (*TRIGGERS, "seconds"),
    "corrupt": TRIGGERS,
    "nan": ("round",),
    "poison": ("round", "rounds"),
    "join": TRIGGERS,
    "leave": (*TRIGGERS, "back"),
}
EXAMPLES: dict[Kind, str] = {
    "kill": "kill:1@round=3,back=5",
    "freeze": "freeze:1@round=3,seconds=20",
    "cut": "cut:0-1@step=40,seconds=15",
    "slow": "slow:2x3",
    "corrupt": "corrupt:1@round=4",
    "nan": "nan:1@round=4",
    "poison": "poison:1@round=5,rounds=1",
    "join": "join:@round=4",
    "leave": "leave:1@round=6",
}
SECONDS: dict[str, float] = {"freeze": 20.0, "cut": 15.0, "slow": 10.0}
"""How long, when `seconds` is not given."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It happens when `who` has begun round `round`, made `step` inner steps, or at `second`.

    `who` is empty for a join; `others` is a cut's other side, empty for everybody else.
    """

    kind: Kind
    who: tuple[Who, ...] = ()
    others: tuple[Who, ...] = ()
    factor: float | None = None
    round: int | None = None
    step: int | None = None
    second: float | None = None
    """Seconds since the run's first commit."""
    phase: "Phase | None" = None
    seconds: float | None = None
    back: float | None = None
    rounds: int | None = None

    def __str__(self) -> str:
        """As it is written on the command line."""
        who = "+".join(map(str, self.who)) + ("-" + "+".join(map(str, self.others)) if self.others else "")
        names = (*TRIGGERS, "phase", "seconds", "back", "rounds")
        values = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        options = ",".join(f"{name}={written(value)}" for name, value in values)
        factor = "" if self.factor is None else f"x{self.factor:g}"
        return f"{self.kind}:{who}{factor}" + (f"@{options}" if self.kind != "slow" or options else "")

    @property
    def has_trigger(self) -> bool:
        """Whether it waits for a moment, and is not there from the start."""
        return any(getattr(self, name) is not None for name in TRIGGERS)

    @property
    def is_own(self) -> bool:
        """Whether the island sees to it by itself, from its config."""
        at_round = self.kind in ("nan", "poison") or (self.kind == "corrupt" and self.round is not None)
        return at_round or self.phase is not None or (self.kind == "slow" and not self.has_trigger)


def written(value: float | str) -> str:
    """A value without digits that say nothing."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@lru_cache(maxsize=4096)
def parse_fault(text: str) -> Fault:
    """The fault that `text` means. Raises ConfigError: what, got, allowed, an example."""
    kind, colon, rest = text.partition(":")
    if kind not in EXAMPLES:
        near = difflib.get_close_matches(kind, EXAMPLES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise wrong(text, f"unknown kind {kind!r}; {hint}kinds: {', '.join(EXAMPLES)}")
    if not colon:
        raise wrong(text, f"a ':' must follow {kind!r}", kind)
    whom, _, options = rest.partition("@")
    who, others, factor = parse_whom(text, kind, whom)
    values = parse_options(text, kind, options)
    fault = Fault(kind=kind, who=who, others=others, factor=factor, **values)
    check_alone(text, fault)
    return fault


def parse_whom(text: str, kind: Kind, whom: str) -> tuple[tuple[Who, ...], tuple[Who, ...], float | None]:
    """Who is struck, a cut's other side, how many times slower."""
    if kind == "join":
        if whom:
            raise wrong(text, f"got {whom!r} before '@'; a join names no island, it adds one", kind)
        return (), (), None
    if kind == "cut":
        some, dash, others = whom.partition("-")
        sides = parse_group(text, kind, some), parse_group(text, kind, others) if dash else ()
        both = set(sides[0]) & set(sides[1])
        if both:
            raise wrong(text, f"{min(map(str, both))} is on both sides", kind)
        return *sides, None
    if kind == "slow":
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", whom)
        if match is None or float(match[2]) <= 1:
            raise wrong(text, f"got {whom!r}; allowed: an island, 'x' and a number above 1", kind)
        return (int(match[1]),), (), float(match[2])
    who = parse_group(text, kind, whom)
    if len(who) > 1 or (who == (BOOTSTRAP,) and kind not in ("kill", "freeze")):
        allowed = "one island" + (f", or {BOOTSTRAP}" if kind in ("kill", "freeze") else "")
        raise wrong(text, f"got {whom!r}; allowed: {allowed}", kind)
    return who, (), None


def parse_group(text: str, kind: Kind, group: str) -> tuple[Who, ...]:
    """Islands, and maybe the bootstrap process, joined by '+'."""
    names = group.split("+")
    for name in names:
        if not name.isdecimal() and name != BOOTSTRAP:
            raise wrong(text, f"got {name!r} for an island; allowed: its index (0, 1, ...) or {BOOTSTRAP}", kind)
    return tuple(dict.fromkeys(BOOTSTRAP if name == BOOTSTRAP else int(name) for name in names))


def parse_options(text: str, kind: Kind, options: str) -> dict[str, Any]:
    """The values behind '@', checked one by one."""
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if name not in OPTIONS[kind]:
            near = difflib.get_close_matches(name, OPTIONS[kind], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise wrong(text, f"unknown option {name!r}; {hint}options of {kind}: {', '.join(OPTIONS[kind])}", kind)
        if not equals or name in values:
            raise wrong(text, f"{name!r} must be given a value, once", kind)
        values[name] = parse_value(text, kind, name, value)
    if kind in SECONDS and (kind != "slow" or values):
        values.setdefault("seconds", SECONDS[kind])
    return values


def parse_value(text: str, kind: Kind, name: str, value: str) -> int | float | str:
    """One option's value."""
    if name == "phase":
        from outer.phases import PHASES

        if value not in PHASES:
            near = difflib.get_close_matches(value, PHASES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise wrong(text, f"unknown phase {value!r}; {hint}phases: {', '.join(PHASES)}", kind)
        return value
    if name in ("round", "step", "rounds"):
        least = 0 if name == "round" else 1
        if not value.isdecimal() or int(value) < least:
            raise wrong(text, f"{name}: got {value!r}; allowed: a whole number from {least} on", kind)
        return int(value)
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise wrong(text, f"{name}: got {value!r}; allowed: a number of seconds", kind)
    return float(value)


def check_alone(text: str, fault: Fault) -> None:
    """Raise ConfigError unless the fault's options go together."""
    given = [name for name in TRIGGERS if getattr(fault, name) is not None]
    allowed = [name for name in TRIGGERS if name in OPTIONS[fault.kind]]
    if len(given) > 1:
        raise wrong(text, f"got {' and '.join(given)}; it can wait for one of them only", fault.kind)
    if not given and fault.kind != "slow":
        raise wrong(text, f"it does not say when; add {' or '.join(f'@{name}=N' for name in allowed)}", fault.kind)
    if fault.phase is not None and (fault.round is None or fault.who == (BOOTSTRAP,)):
        raise wrong(text, "a phase is one of an island's round: say the island and @round=N,phase=...", fault.kind)


def wrong(text: str, problem: str, kind: Kind = "kill") -> ConfigError:
    """The error of a mistyped fault."""
    return ConfigError(f"--fault {text!r}: {problem}; for example {EXAMPLES[kind]}")


def check_faults(faults: Iterable[Fault], num_islands: int, *, has_bootstrap: bool) -> None:
    """Raise ConfigError if one names an island that will not be there; each join makes one more."""
    faults = list(faults)
    there = num_islands + sum(fault.kind == "join" for fault in faults)
    for fault in faults:
        for name in (*fault.who, *fault.others):
            if name == BOOTSTRAP and not has_bootstrap:
                raise wrong(str(fault), "a run over loopback has no bootstrap process", fault.kind)
            if isinstance(name, int) and name >= there:
                raise wrong(str(fault), f"there is no island {name}; allowed: 0 to {there - 1}", fault.kind)
