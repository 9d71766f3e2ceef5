"""Arguments and options that several commands share or that have a long help text."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value ...]", help="Values that override those in the file."
    ),
]
NumIslands = Annotated[
    int | None, typer.Option(min=1, help="Number of islands (default: as in CONFIG).")
]
Resume = Annotated[
    Literal["auto", "never"] | None,
    typer.Option(
        help="auto: resume from the newest complete checkpoint, if there is one; never: start from "
        "the beginning. "
        "Overrides every other setting of island.checkpoint.resume (default: auto).",
    ),
]
ResumeRun = Annotated[
    bool,
    typer.Option("--resume", help="Continue the stopped run of this name from its checkpoints."),
]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Inject a fault, as described above. Repeatable. Example: --fault kill:1@round=3.",
    ),
]
Storm = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Inject random faults after the first commit, on average RATE faults per island and "
        "minute. At least half "
        "of the islands stay up, so a fault may be delayed. Example: --storm 2.",
    ),
]
StormSeed = Annotated[
    int,
    typer.Option(help="Seed of the storm: the same seed gives the same faults in the same order."),
]
StormCount = Annotated[
    int | None,
    typer.Option(min=1, help="Number of faults after which the storm ends (default: no limit)."),
]
Netns = Annotated[
    bool,
    typer.Option(
        "--netns",
        help="Run each island in its own network namespace (implied by a cut). Needs root.",
    ),
]
Nodes = Annotated[
    int,
    typer.Option(
        min=1,
        help="Divide the ranks of each island over this many nodes. Each node is started by "
        "torchrun as on a cluster, "
        "with its own network namespace, host name and /tmp. Nodes of an island have links of 10 "
        "Gbit/s. Needs root.",
    ),
]
Nat = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ISLAND",
        help="Put this island behind a masquerading NAT, so that others reach it only through a "
        "relay. Two relays are "
        "started, too. Needs root, nft and outer.transport=tls. Repeatable.",
    ),
]
Proxy = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ISLAND",
        help="Put this island into a cluster whose only way out is an HTTP proxy, and which others "
        "reach only through "
        "a relay. Both are started, too. Needs root, nft and outer.transport=tls. Repeatable.",
    ),
]
LinkOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ISLAND:]RATE[,rtt=TIME]",
        help="Limit the islands' access links to RATE in each direction and add a round-trip time "
        "of TIME between "
        "islands. Needs root. Repeatable: 1gbit for all islands, 0:50mbit for island 0. With rtt, "
        "on a kernel without "
        "netem, all islands together get about 2 Gbit/s. Example: --link 100mbit,rtt=50ms.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Run all islands as threads of one process that take turns on its processors. Many "
        "islands fit on a small "
        "machine, with exactly the results of real processes. Example: --in-process --islands 32 "
        "--ranks 1.",
    ),
]
Virtual = Annotated[
    bool,
    typer.Option(
        "--virtual",
        help="Run the outer loop of all islands on a virtual clock, with 64 islands or more. Inner "
        "steps and links are "
        "modelled, payloads are counted and not moved, nothing is written. Needs --step-seconds; "
        "can be combined with --islands, --link, --storm and the faults kill, freeze, slow and "
        "join. "
        "Example: --virtual --islands 64 --step-seconds 0.5 --link 100mbit,rtt=50ms.",
    ),
]
StepSeconds = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="With --virtual: time of an inner step on the fastest island."
    ),
]
HostSeconds = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With --virtual: time of an island's own work in a round, such as coding and the "
        "outer step (default: 0).",
    ),
]
Spread = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --virtual: how much longer an inner step takes on the last island than on the "
        "first, as a fraction. "
        "The other islands are in between. Example: --spread 0.2.",
    ),
]
Flops = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Peak FLOP/s of a rank, for example 400T (default: measured)."
    ),
]
GpuNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="GPUs of the islands, instead of --flops: one kind for all islands, or one per "
        "island: h100 or h100,a100.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="GPUs of all islands: adds what scaling laws say about size, batch, loss and time.",
    ),
]
Watts = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="With --gpus: power in watts of a GPU with its share of the machine, for the energy.",
    ),
]
Hours = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --gpus: adds the best size for this many hours."),
]


def with_resume(overrides: list[str] | None, resume: str | None) -> list[str]:
    """Return the overrides, followed by --resume as an override if it is given, so that it takes
    precedence.
    """
    return [*(overrides or []), *([] if resume is None else [f"island.checkpoint.resume={resume}"])]
