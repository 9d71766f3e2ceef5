"""`diloco rehearse`: a small run with a config's own outer settings, and every fault that an
operator should have seen once, one after another.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from diloco.config.own_code import load_own_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.faults.disturbances import Disturbances
from diloco.network_emulation.namespaces import check_possible
from diloco.network_emulation.nat import check_nat_possible
from diloco.records.run_folder import read_run
from diloco.rehearsal.one_by_one import OneByOne
from diloco.rehearsal.table import print_rehearsal
from diloco.simulate.launch import INTERRUPTED, resize, simulate_config
from outer.space.experts import have_own_groups

MOST_RANKS = 2
SMALL_EXPERTS = {"number": 4, "per_token": 2, "dim": 16}
"""A small mixture, for a run that treats experts otherwise than the rest of the model."""
ROUNDS = 1_000_000
"""More rounds than a rehearsal has: it ends by a request to stop."""


def rehearse(path: Path, overrides: list[str]) -> int:
    """Run the rehearsal and print its table.

    Return exit status 0 if the others committed again after every fault, every island came back and
    all digests are equal; 1 if not; 130 if interrupted. Raises ConfigError and InputError.
    """
    given = load_own_config(path, overrides)
    config = in_the_small(given)
    console = Console()
    # The last island is put behind a NAT, so that the others reach it through a relay alone.
    can_hide = uses_relays(given) and _is_possible(partial(check_nat_possible, "a relay"))
    hidden = (len(config.islands) - 1,) if can_hide else ()
    faults = list(
        planned_faults(config, can_cut=_is_possible(check_possible), has_relays=bool(hidden))
    )
    console.print(
        f"{len(faults)} faults, one after another, each when all islands train again",
        soft_wrap=True,
    )
    disturbances = Disturbances(faults=tuple(faults), nat=hidden)
    status, run_dir = simulate_config(config, console, disturbances=disturbances, injector=OneByOne)
    if status == INTERRUPTED:
        return status
    return 0 if print_rehearsal(read_run(run_dir), console) else 1


def in_the_small(config: Config) -> Config:
    """Return a config with the same islands and outer settings and a tiny model on small text.

    Islands have at most two ranks on the processor. Addresses, keys and other places are left out.
    Raises ConfigError for a run of one island.
    """
    config = resize(config, None, None)
    if len(config.islands) < 2:
        raise ConfigError(
            "a rehearsal needs two islands: add entries to `islands`, or set outer.start_islands=2"
        )
    outer = config.outer
    layers = max(2, outer.fragments)
    experts = SMALL_EXPERTS if have_own_groups(outer) else None
    ranks = [
        min(MOST_RANKS, config.for_island(index).ranks) for index in range(len(config.islands))
    ]
    values = {
        "name": f"{config.name}-rehearsal",
        "model": {
            "dim": 32,
            "num_layers": layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_dim": 64,
            "experts": experts,
        },
        "data": {"source": "python-stdlib", "seq_len": 32},
        "optimizer": {
            "tokens_per_step": 32 * 4 * MOST_RANKS,
            "warmup_steps": 0,
            "schedule": "constant",
        },
        "outer": outer.model_dump(mode="json") | {"rounds": ROUNDS * outer.experts.every},
        "evaluate": {"every_rounds": ROUNDS, "tokens": 32},
        "island": {
            "micro_batch": 4,
            "device": "cpu",
            "run_dir": config.island.run_dir,
            "cache_dir": config.island.cache_dir,
            "checkpoint": {"every_rounds": 5},
        },
        "islands": [{"ranks": each} for each in ranks],
    }
    return Config.model_validate(values)


def uses_relays(config: Config) -> bool:
    """Return whether islands of the config are reached through a relay."""
    islands = map(config.for_island, range(len(config.islands)))
    return config.outer.network.has_routes and (
        bool(config.island.relays) or any(each.relays for each in islands)
    )


def planned_faults(config: Config, *, can_cut: bool, has_relays: bool = False) -> Iterator[str]:
    """Yield the faults of a rehearsal in their order, as `--fault` takes them."""
    last = len(config.islands) - 1
    if config.for_island(last).ranks > 1:
        yield f"kill:{last}@second=0,process=rank1,back=1"
    yield f"kill:{last}@second=0,back=1"
    yield f"freeze:{last}@second=0,seconds=8"
    yield f"leave:{last}@second=0,back=1"
    yield f"corrupt:{last}@second=0"
    yield "kill:0@second=0,back=1"
    if config.outer.network.leaves_process:
        yield "kill:bootstrap@second=0,back=1"
    if has_relays:
        yield "kill:relay0@second=0,back=1"
    if can_cut:
        yield f"cut:{last}@second=0,seconds=8"
    yield f"kill:{'+'.join(map(str, range(last + 1)))}@second=0,back=1"
    yield "join:@second=0"


def _is_possible(check: Callable[[], None]) -> bool:
    """Return whether this machine and user can do what `check` checks."""
    try:
        check()
    except ConfigError:
        return False
    return True
