"""Lets an island answer visitors: `diloco doctor` on every rank, `diloco status` and `diloco watch`
on rank 0.
"""

import platform
from dataclasses import dataclass

import torch

from diloco.config.schema import IslandConfig, RunConfig
from diloco.records.logbook import Logbook
from diloco.records.metrics import EventRecord, Metrics
from diloco.status.operator_orders import OrderServer
from diloco.status.record_pages import RecordsServer
from diloco.status.reply import Doing, Place, StatusServer
from outer.connect.settings import Network
from outer.diagnostics import DiagnosticsServer, ProbeResponder
from outer.loop import OuterLoop


@dataclass(frozen=True)
class Equipment:
    """What an island trains with, as visitors are shown it."""

    mesh: str
    device: str
    doing: Doing | None = None
    """The current work of its training thread; None if nothing records it."""


def serve_visitors(
    config: RunConfig,
    island: IslandConfig,
    network: Network,
    outer: OuterLoop,
    metrics: Metrics | None,
    equipment: Equipment,
) -> RecordsServer | None:
    """Answer visitors' calls from now on. `metrics` are rank 0's, None on other ranks.

    On rank 0, the returned server must `linger` before the network closes.
    """
    DiagnosticsServer(network.messenger, ProbeResponder(config.hash, lambda: outer.position.round))
    if metrics is None:
        return None
    place = Place(
        island=island.label,
        num_steps=config.total_steps,
        num_rounds=config.outer.num_rounds,
        ranks=island.ranks,
        mesh=equipment.mesh[:64],
        hardware=name_device(equipment.device)[:64],
    )
    StatusServer(network.messenger, metrics, place, lambda: outer.position, equipment.doing)
    book = Logbook(metrics.path.parent.parent, island.label)

    def note(name: str, text: str) -> None:
        metrics.write(EventRecord(name=name, text=text))
        book.note(name, text)

    OrderServer(config.name, metrics.path.parent, island.operators, note).serve(network.messenger)
    records = RecordsServer(metrics.path)
    records.serve(network.messenger)
    return records


def name_device(device: str) -> str:
    """Return the name of a GPU, or the kind of processor."""
    return (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"CPU ({platform.machine()})"
    )
