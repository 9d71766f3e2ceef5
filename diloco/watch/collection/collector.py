"""Collect the records of a run's islands over the network, into a folder with the layout of a run's
own folder.

The collector visits the swarm as `diloco status` does and announces nothing, so no island counts it
as a member. It has one task per island that requests this island's records, so a silent island
delays no other.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.config.from_swarm import parse_swarm_config
from diloco.config.schema import RunConfig, dump_config
from diloco.errors import ConfigError
from diloco.formatting import one_line
from diloco.records.run_folder import CONFIG, METRICS
from diloco.status.operator_orders import CALL as ORDER
from diloco.status.operator_orders import Carried, Order
from diloco.status.record_pages import CALL, PAGE_BYTES, RecordsPage
from diloco.status.swarm import CALL_SECONDS, ask_status, explain_silence
from diloco.swarm.visit import choose_run, find_runs_at, open_run_network, resolve_visitor
from diloco.watch.collection.mirror import RecordsMirror
from inner.files import write_atomically
from outer.connect.settings import Network
from outer.errors import MessageError, OuterError
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.network.event_loop import EventLoopThread
from outer.network.messages import call_message, receive_reply

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
LONGEST_REPLY = 1 << 20
"""Most bytes of a reply. A page of records is shorter: its lines have PAGE_BYTES before JSON
escapes them."""
FIRST_SECONDS = 30.0
"""Longest wait for the first record of any island."""
GONE_SECONDS = 5.0
"""How long an island is still asked after its record has left the swarm, because it may have last
records to send."""
MAX_ISLANDS = 1024


class Collector:
    """Collects the records of one run. `start` returns once its folder holds records; `close` ends
    the visit.
    """

    def __init__(
        self, address: str, overrides: Sequence[str], run_name: str | None, folder: Path
    ) -> None:
        """Create a collector that writes to `folder`/RUN_NAME.

        Raises ConfigError if an override does not begin with `island.`.
        """
        self.address = address
        self.overrides = overrides
        self._run_name = run_name
        self._parent = folder
        self._local = resolve_visitor(overrides, address)
        self._loop = EventLoopThread()
        self._has_records = threading.Event()
        self.members: dict[str, Member] = {}
        """The islands of which the swarm has a record at present."""
        self._network: Network | None = None
        self._silence: dict[str, str] = {}
        self.folder = folder
        self.run: RunConfig | None = None

    def start(self) -> Path:
        """Visit the swarm and return the run's folder. Raises ConfigError or OuterError if no
        records can be collected.
        """
        runs = self._loop.run(find_runs_at(self._local, self.address, self._run_name))
        info = choose_run(runs, self._run_name, self.address)
        self.run = parse_swarm_config(info.config_text)
        self.folder = self._parent / self.run.name
        write_atomically(self.folder / CONFIG, dump_config(self.run))
        visit = self._loop.start(self._visit(self.run, info))
        deadline = time.monotonic() + FIRST_SECONDS
        while not self._has_records.wait(0.1):
            if visit.done():
                visit.result()
            if time.monotonic() > deadline:
                causes = [f"{name}: {cause}" for name, cause in sorted(self._silence.items())]
                why = "; ".join(causes[:4]) or "the swarm lists no island that is alive"
                raise ConfigError(
                    f"no island of {self.run.name!r} sent a record in {FIRST_SECONDS:g} s ({why})"
                )
        return self.folder

    def order(self, orders: Mapping[str, Order], seconds: float) -> dict[str, str | OuterError]:
        """Send each island its order. Return each island's reply, or the error why it did not
        follow the order.

        May be called on any thread except the event loop's.
        """
        return self._loop.run(self._order_all(orders, seconds))

    def close(self) -> None:
        """Leave the swarm. Further calls do nothing."""
        with suppress(RuntimeError):
            self._loop.close()

    async def _order_all(
        self, orders: Mapping[str, Order], seconds: float
    ) -> dict[str, str | OuterError]:
        assert self._network is not None, "the collector has been started"
        messenger = self._network.messenger

        async def order(name: str) -> str | OuterError:
            try:
                address = self.members[name].control_addresses[0]
                call = call_message(
                    messenger, address, ORDER, orders[name], Carried, timeout_seconds=seconds
                )
                return one_line((await call).text)
            except OuterError as error:
                return error

        return dict(zip(orders, await asyncio.gather(*map(order, orders)), strict=True))

    async def _visit(self, run: RunConfig, info: RunInfo) -> None:
        async with (
            open_run_network(self._local, self.address, run, info) as network,
            asyncio.TaskGroup() as tasks,
        ):
            self._network = network
            followed: set[str] = set()
            while True:
                assert network.membership is not None, "rank 0 has a membership"
                with suppress(
                    OuterError
                ):  # If this fails, the islands known so far are still asked.
                    self.members = await network.membership.members()
                for name in sorted(self.members.keys() - followed)[: MAX_ISLANDS - len(followed)]:
                    followed.add(name)
                    tasks.create_task(self._follow(network, name))
                await asyncio.sleep(POLL_SECONDS)

    async def _follow(self, network: Network, name: str) -> None:
        """Request records from one island in a loop, without a pause while it has more."""
        if name.startswith("."):
            return  # The name cannot be the name of a folder.
        mirror = RecordsMirror(self.folder / name)
        described = ""
        member = self.members[name]
        seen_at = time.monotonic()
        while True:
            has_more = False
            if name in self.members:
                member = self.members[name]
                seen_at = time.monotonic()
            try:
                if time.monotonic() - seen_at > GONE_SECONDS:
                    mirror.note_presence(
                        answers=False, text="the swarm has no record of it any more"
                    )
                else:
                    has_more = await self._ask(network, mirror, member)
                    if described != member.incarnation:
                        mirror.note_machine(await ask_status(network, member))
                        described = member.incarnation
                    mirror.note_presence(answers=True, text="")
                    self._silence.pop(name, None)
            except OuterError as error:
                self._silence[name] = explain_silence(error)
                mirror.note_presence(answers=False, text=self._silence[name])
            except OSError as error:
                log.error("%s: records are not kept: %s", mirror.folder, error)
            except Exception:  # Bad data from one peer must not end the collection from the others.
                log.exception("%s: its records cannot be read", mirror.folder)
            await asyncio.sleep(0 if has_more else POLL_SECONDS)

    async def _ask(self, network: Network, mirror: RecordsMirror, member: Member) -> bool:
        """Request the next page of records. Return whether the island has more."""
        if mirror.is_full:
            raise MessageError(
                f"it has sent more than {mirror.folder / METRICS} may hold: no further records are "
                "kept"
            )
        address = member.control_addresses[0]
        body = mirror.request.encode()
        call = network.messenger.call(
            address, CALL, body, timeout_seconds=CALL_SECONDS, longest=LONGEST_REPLY
        )
        page = await receive_reply(network.messenger, address, RecordsPage, await call)
        before = mirror.request
        await asyncio.to_thread(mirror.add, page)
        if page.journal:
            self._has_records.set()
        return page.size - page.end >= PAGE_BYTES // 4 and mirror.request != before
