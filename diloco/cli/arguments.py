"""Arguments and options of the commands that several commands share or that have a long help text."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values that override those of the file.")
]
NumIslands = Annotated[int | None, typer.Option(min=1, help="Number of islands (default: as in CONFIG).")]
Resume = Annotated[
    Literal["auto", "never"] | None,
    typer.Option(
        help="auto: resume from the newest complete checkpoint, if there is one; never: start from the beginning. "
        "Overrides every other setting of island.checkpoint.resume (default: auto)."
    ),
]
ResumeRun = Annotated[
    bool, typer.Option("--resume", help="Go on with the run of this name, which was stopped, from its checkpoints.")
]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC", help="Inject a fault, as described above. Repeatable. Example: --fault kill:1@round=3."
    ),
]
Storm = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Inject random faults after the first commit, on average RATE per island and minute. At least half of the "
        "islands stay up, so a fault may have to wait. Example: --storm 2.",
    ),
]
StormSeed = Annotated[
    int, typer.Option(help="Seed of the storm: the same seed gives the same faults in the same order.")
]
StormCount = Annotated[
    int | None, typer.Option(min=1, help="Number of faults after which the storm ends (default: it lasts all the run).")
]
Netns = Annotated[
    bool, typer.Option("--netns", help="Run each island in its own network namespace, as a cut does; needs root.")
]
Nodes = Annotated[
    int,
    typer.Option(
        min=1,
        help="Divide the ranks of each island over this many nodes, each started by torchrun as on a cluster, with a "
        "network namespace, a host name and a /tmp of its own; 10 Gbit/s between the nodes of an island; needs root.",
    ),
]
Nat = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ISLAND",
        help="Put this island behind a masquerading NAT, where others reach it by a relay only; two are started, too. "
        "Needs root, nft and outer.transport=tls. Repeatable.",
    ),
]
Proxy = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ISLAND",
        help="Put this island into a cluster that nothing leaves but by an HTTP proxy, and where others reach it by a "
        "relay only; both are started, too. Needs root, nft and outer.transport=tls. Repeatable.",
    ),
]
LinkOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ISLAND:]RATE[,rtt=TIME]",
        help="Limit the islands' access links to RATE in each direction and add a round-trip time of TIME between "
        "islands; needs root. Repeatable: 1gbit for all islands, 0:50mbit for island 0. With rtt, on a kernel without "
        "netem, all islands together get about 2 Gbit/s. Example: --link 100mbit,rtt=50ms.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Run all islands as threads of one process that take turns on its processors: many islands fit on a small "
        "machine, with exactly the results of real processes. Example: --in-process --islands 32 --ranks 1.",
    ),
]
Virtual = Annotated[
    bool,
    typer.Option(
        "--virtual",
        help="Run the outer loop of all islands on a virtual clock: 64 islands fit. Inner steps and links are "
        "modelled, payloads are counted and not moved, nothing is written. Needs --step-seconds; takes --islands, "
        "--link, --storm and the faults kill, freeze, slow and join. "
        "Example: --virtual --islands 64 --step-seconds 0.5 --link 100mbit,rtt=50ms.",
    ),
]
StepSeconds = Annotated[
    str | None, typer.Option(metavar="TIME", help="With --virtual: time of an inner step on the fastest island.")
]
HostSeconds = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With --virtual: time of an island's own work in a round, as coding and the outer step (default: 0).",
    ),
]
Spread = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --virtual: extra step time of the last island, as a fraction of the first one's; the others lie "
        "between. Example: --spread 0.2.",
    ),
]
Flops = Annotated[
    str | None, typer.Option(metavar="RATE", help="Peak FLOP/s of a rank, for example 400T (default: measured).")
]
GpuNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Instead of --flops the GPUs of the islands, one kind or one for each: h100 or h100,a100.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs of all islands: adds what scaling laws say of size, batch, loss and time."),
]
Watts = Annotated[
    float | None,
    typer.Option(min=1, help="With --gpus: power of a GPU with its share of the machine, for the energy."),
]
Hours = Annotated[float | None, typer.Option(min=0.01, help="With --gpus: the best size and tokens for so many hours.")]


def with_resume(overrides: list[str] | None, resume: str | None) -> list[str]:
    """The overrides, followed by the value of --resume if it is given, which therefore wins."""
    return [*(overrides or []), *([] if resume is None else [f"island.checkpoint.resume={resume}"])]
