"""Chooses an island's micro-batch, recomputation and mesh at its first start (`island.auto`)."""

import hashlib
import json
import logging
from pathlib import Path

import torch

from diloco.config.check import list_candidates
from diloco.config.schema import IslandConfig, RunConfig
from diloco.errors import ConfigError
from diloco.formatting import human_bytes, human_count
from diloco.records.best_effort import best_effort
from diloco.records.logbook import Logbook
from diloco.tuning.candidates import Candidates, describe, peak_bytes
from inner.files import write_atomically
from outer.space.ranks import RankGroup

log = logging.getLogger(__name__)

FILE = "chosen.json"


def choose_settings(
    run: RunConfig, island: IslandConfig, device: str, ranks: RankGroup, folder: Path
) -> IslandConfig:
    """Return the island with the settings that its config leaves open.

    Every rank must call it together. A later start in the same `folder`, with the same ranks and
    kind of device, takes the same settings, so that a resumed run goes on bit for bit. Raises
    ConfigError if no setting fits into the memory.
    """
    if not island.auto:
        return island
    islands = list_candidates(run, island)
    free = min(ranks.gather(_free_bytes(device)))
    key = _key(run, island, device)
    path = folder / FILE
    number = ranks.on_leader(lambda: _read(path, key))
    if number is None:
        number, text = ranks.on_leader(lambda: _choose(Candidates(run, islands, device, free)))
        if ranks.is_leader:
            with best_effort(f"{path} was not written: a later start may choose other settings"):
                write_atomically(path, json.dumps({"number": number, "key": key, "text": text}))
            Logbook(folder.parent, island.label).note("chose", text)
            log.info("chose %s", text)
    return islands[number]


def _free_bytes(device: str) -> float:
    """Return the free bytes of this rank's GPU.

    Infinity on the CPU, where the host's memory counts.
    """
    return float(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else float("inf")


def _key(run: RunConfig, island: IslandConfig, device: str) -> str:
    """Return a hash of all that a choice depends on, except for memory and speed, which vary."""
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    settings = island.model_dump_json(
        include={"ranks", "auto", "mesh", "parallel", "micro_batch", "compute_dtype"}
    )
    return hashlib.sha256(f"{run.hash} {settings} {kind}".encode()).hexdigest()[:32]


def _read(path: Path, key: str) -> int | None:
    """Return the number of the candidate that an earlier start chose; None if none has this key."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found["number"] if isinstance(found, dict) and found.get("key") == key else None


def _choose(candidates: Candidates) -> tuple[int, str]:
    """Return the number of the best candidate, and the reason as text.

    Raises ConfigError if none fits.
    """
    number_of_all = len(candidates.islands)
    last = candidates.islands[-1]
    fitting = candidates.find_fitting()
    if not fitting:
        raise ConfigError(
            f"island.auto: none of {number_of_all} settings fits into the memory of "
            f"{last.label!r}; the smallest, {describe(last)}, needs "
            f"{human_bytes(peak_bytes(candidates.run, last, candidates.device))} per rank for an "
            "inner step; use more ranks or a smaller model"
        )
    speeds = candidates.measure(fitting)
    best = candidates.find_best(speeds)
    island = candidates.islands[best]
    return best, (
        f"{describe(island)}; {len(speeds)} of {number_of_all} candidates were compared, a layer "
        f"does {human_count(speeds[best])} tokens/s, an inner step is planned to need "
        f"{human_bytes(peak_bytes(candidates.run, island, candidates.device))} per rank"
    )
