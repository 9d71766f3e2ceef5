"""What audits of reducers cost: CPU time, bytes and memory of a round's reduce.

    python -m scripts.bench.outer.audit [--islands 2,4,8] [--audits 0,0.1,1] [--codec int8]
        [--million 2] [--rounds 5]

Islands are objects of one process, which reduce over loopback; nothing else of a round is measured.
The CPU time of the whole process is divided by the number of islands. `sent` is the mean number of
bytes that an island sends, counted by its transport.
"""

import argparse
import asyncio
import hashlib
import time
from dataclasses import dataclass

import torch

from outer.agreement.messages import Plan, Ready
from outer.audits.commitments import Commitments
from outer.audits.kept_payloads import KeptPayloads
from outer.codecs.choice import build_codec_choice, build_space
from outer.config import OuterConfig
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.membership.loopback import LoopbackMessenger
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint
from outer.network.messages import pack_carriers
from outer.reduce.attempt import Attempts
from outer.reduce.auditor import Auditor
from outer.reduce.reducer import Reducer
from outer.space.layout import Space
from outer.transports.loopback import Hub, LoopbackTransport
from scripts.bench.arguments import whole_numbers

GUARD_SECONDS = 600.0
COLUMNS = ("islands", "audit", "CPU ms", "wall ms", "sent kB", "x", "audited", "kept kB")


@dataclass(frozen=True)
class Weight:
    """The only parameter of the model that is reduced."""

    name: str
    shape: tuple[int, ...]


class Island:
    """An island of one rank that reduces and audits."""

    def __init__(
        self, hub: Hub, name: str, config: OuterConfig, space: Space, names: KnownNames
    ) -> None:
        self.name = name
        self.me = Endpoint(name, 0)
        key = IslandKey(hashlib.sha256(name.encode()).digest())
        names.claim(name, key.public)
        self.transport = LoopbackTransport(hub, "bench", self.me, GUARD_SECONDS)
        self.messenger = LoopbackMessenger(hub, "bench", self.me, self.transport.traffic)
        kept = KeptPayloads(Commitments(key, names)) if config.audit > 0 else None
        reducer = Reducer(
            self.transport,
            build_codec_choice(config),
            space,
            self.me,
            config=config.merge,
            kept=kept,
        )
        deadlines = Deadlines(GUARD_SECONDS)
        auditor = None
        if kept is not None:
            kept.serve(self.messenger)
            shown = (kept.commitments, reducer.payloads, config.merge, self.messenger, deadlines)
            auditor = Auditor(config.audit, self.me, *shown)
        self.attempts = Attempts(self.transport, reducer, deadlines, auditor)
        self.kept = kept

    def ready(self, round_number: int, space: Space) -> Ready:
        return Ready(
            island=self.name,
            incarnation="00000000",
            key="0" * 64,
            round=round_number,
            attempt=0,
            base_tokens=0,
            tokens=1,
            weight=1,
            digest="0" * 32,
            carriers=pack_carriers([0] * len(space.parts)),
            epoch=self.attempts.epoch,
            transport_addresses=[self.transport.address],
            control_addresses=[self.messenger.address],
        )


def main() -> None:
    """Print the table."""
    args = _arguments()
    torch.set_num_threads(1)
    print(
        f"{args.million}M elements in {args.codec}, {args.rounds} rounds; torch "
        f"{torch.__version__}, 1 thread per op"
    )
    print("".join(f"{column:>10}" for column in COLUMNS), flush=True)
    for num_islands in args.islands:
        plain_bytes = None
        for audit in args.audits:
            config = OuterConfig(codec=args.codec, audit=audit, transport="loopback")
            cpu, wall, sent, audited, kept = asyncio.run(
                _measure(config, num_islands, args.million * 10**6, args.rounds)
            )
            plain_bytes = plain_bytes or sent
            times = f"{cpu * 1e3:>10.0f}{wall * 1e3:>10.0f}"
            row = f"{times}{sent / 1e3:>10.0f}{sent / plain_bytes:>10.2f}"
            print(
                f"{num_islands:>10}{audit:>10g}{row}{audited:>10.1f}{kept / 1e3:>10.0f}", flush=True
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--islands", type=whole_numbers, default=[2, 4, 8], help="comma-separated")
    parser.add_argument(
        "--audits", type=_numbers, default=[0.0, 0.1, 1.0], help="values of outer.audit, 0 first"
    )
    parser.add_argument("--codec", default="int8", help="outer.codec")
    parser.add_argument("--million", type=int, default=2, help="millions of elements to reduce")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of measured rounds, after one that is not measured",
    )
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


async def _measure(
    config: OuterConfig, num_islands: int, num_elements: int, num_rounds: int
) -> tuple[float, float, float, float, float]:
    """Return CPU seconds, wall seconds, bytes sent, parts audited and bytes kept.

    All are means per island and round, except for the wall seconds, which are per round.
    """
    space = build_space([Weight("w", (num_elements,))], config)
    hub = Hub()
    names = KnownNames()
    islands = [Island(hub, f"island-{index}", config, space, names) for index in range(num_islands)]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_elements, generator=generator)
    pseudo_grads = {part.index: values[part.start : part.stop] for part in space.parts}
    num_audited = num_kept = started = cpu_started = sent_before = 0
    for number in range(1 + num_rounds):
        if number == 1:
            started = time.perf_counter()
            cpu_started = time.process_time()
            sent_before = sum(island.transport.traffic.bytes_sent for island in islands)
        plan = Plan(
            round=number,
            attempt=0,
            planner="island-0",
            participants=[i.ready(number, space) for i in islands],
        )
        means = await asyncio.gather(
            *(island.attempts.run(plan, pseudo_grads) for island in islands)
        )
        if number > 0:
            num_audited += sum(island.attempts.num_audited for island in islands)
            num_kept += sum(island.kept.num_bytes for island in islands if island.kept is not None)
        for island, mean in zip(islands, means, strict=True):
            island.attempts.reducer.commit(number, mean)
    sent = sum(island.transport.traffic.bytes_sent for island in islands) - sent_before
    cpu = time.process_time() - cpu_started
    wall = time.perf_counter() - started
    each = num_islands * num_rounds
    return cpu / each, wall / num_rounds, sent / each, num_audited / each, num_kept / each


if __name__ == "__main__":
    main()
