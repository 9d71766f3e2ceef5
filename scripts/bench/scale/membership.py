"""What the records of a run cost at a rendezvous, by the number of islands.

    python -m scripts.bench.scale.membership                 # 8, 16, 32 and 64 islands
    python -m scripts.bench.scale.membership --islands 128 --rounds 5

All islands and the rendezvous are one process, over real sockets on loopback. In each round of
--round-seconds, every island changes its record once, at a random time within a fifth of a second,
as islands do after a commit.
"""

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass

from outer.identity.island_key import IslandKey
from outer.membership.base import Member
from outer.membership.rendezvous import serve_rendezvous
from outer.membership.tcp import RENDEZVOUS, TcpMembership
from outer.network.endpoints import Endpoint, Traffic
from outer.network.retry import retry
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth
from outer.routes.dialer import dial
from scripts.bench.arguments import whole_numbers

COMMIT_SECONDS = 0.2
"""Time within which all islands have committed a round."""
START_SECONDS = 120.0


@dataclass
class Seat:
    """An island that does nothing but hold a record."""

    member: Member
    membership: TcpMembership
    traffic: Traffic

    async def commit(self, after: float, digest: str) -> None:
        """Change the record as after a commit."""
        await asyncio.sleep(after)
        change = {
            "round": self.member.round + 1,
            "tokens": self.member.tokens + 4096,
            "digest": digest,
        }
        self.member = self.member.model_copy(update=change)
        self.membership.update(self.member)


def main() -> None:
    options = parse_arguments()
    print(f"rounds of {options.round_seconds:g} s, means of {options.rounds}")
    print(
        "| islands | kB to an island per round | MB from the rendezvous per round | CPU s per "
        "round, all together |"
    )
    print("|---|---|---|---|")
    for num_islands in options.islands:
        received, cpu = asyncio.run(measure(num_islands, options.rounds, options.round_seconds))
        sent = received * num_islands / 1e6
        print(f"| {num_islands} | {received / 1e3:.1f} | {sent:.2f} | {cpu:.3f} |", flush=True)
    print(f"on {os.cpu_count()} cores at a load of {os.getloadavg()[0]:.1f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--islands", type=whole_numbers, default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=3.0)
    return parser.parse_args()


async def measure(num_islands: int, rounds: int, round_seconds: float) -> tuple[float, float]:
    """Return the bytes that an island receives, and the processor seconds of all, per round."""
    served = serve_rendezvous("127.0.0.1", 0)
    chance = random.Random(0)
    seats = [take_seat(f"island-{number}", served.address) for number in range(num_islands)]
    try:
        for seat in seats:
            await seat.membership.connect(START_SECONDS)
            await seat.membership.announce(seat.member)
        await until_known(seats)
        received = sum(seat.traffic.bytes_received for seat in seats)
        cpu = time.process_time()
        for number in range(rounds):
            pause = asyncio.create_task(asyncio.sleep(round_seconds))
            digest = f"{number:032x}"
            await asyncio.gather(
                *(seat.commit(chance.uniform(0, COMMIT_SECONDS), digest) for seat in seats), pause
            )
        await until_known(seats)
        received = sum(seat.traffic.bytes_received for seat in seats) - received
        return received / num_islands / rounds, (time.process_time() - cpu) / rounds
    finally:
        await asyncio.gather(*(seat.membership.close() for seat in seats))
        served.close()


def take_seat(name: str, address: str) -> Seat:
    traffic = Traffic()
    auth = PeerAuth(island=IslandKey.generate())
    member = Member(
        island=name,
        incarnation="0" * 16,
        identity=auth.island.public,
        config_hash="0" * 32,
        control_addresses=[f"192.0.2.1:{29000 + rank}" for rank in range(8)],
        transport_addresses=[f"gloo:{name}/{rank}@192.0.2.1:{29100 + rank}" for rank in range(8)],
        round=0,
    )
    messenger = StreamMessenger(
        RENDEZVOUS, Endpoint(name, 0), dial, traffic, PeerAuth(island=auth.island, names=None)
    )
    return Seat(member, TcpMembership(messenger, [address], "bench", 30.0, auth), traffic)


async def until_known(seats: list[Seat]) -> None:
    """Wait until every island knows the newest records of all. Raises RuntimeError if that takes
    too long.
    """
    newest = {seat.member.island: seat.member for seat in seats}

    async def are_known() -> bool:
        return all([await seat.membership.members() == newest for seat in seats])

    if not await retry(are_known, seconds=START_SECONDS, pause_seconds=0.1):
        raise RuntimeError(
            f"the records of {len(seats)} islands did not arrive within {START_SECONDS:g} s"
        )


if __name__ == "__main__":
    main()
