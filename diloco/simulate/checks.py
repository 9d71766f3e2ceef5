"""Checks of the faults and links that a simulated run is to have, before anything starts."""

from collections.abc import Sequence

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.faults.disturbances import Disturbances
from diloco.faults.spec import Fault, check_nodes_of, check_processes, check_targets, parse_fault
from diloco.network_emulation.namespaces import check_possible
from diloco.network_emulation.nat import check_nat_possible
from diloco.runtime.processes import PROC
from diloco.simulate.nodes import check_nodes


def check_disturbances(disturbances: Disturbances, config: Config) -> None:
    """Raise ConfigError if a fault is invalid, does not fit the run, or cannot be injected on this
    machine.
    """
    faults = [parse_fault(spec) for spec in disturbances.faults]
    hidden = (*disturbances.nat, *disturbances.proxy)
    is_there = {"has_bootstrap": config.outer.network.leaves_process, "has_relays": bool(hidden)}
    check_targets(faults, len(config.islands), nat=disturbances.nat, **is_there)
    check_processes(
        faults,
        [config.for_island(index).ranks for index in range(len(config.islands))],
        has_daemon=config.outer.network.has_daemon,
    )
    check_parts(faults)
    check_nodes_of(faults, disturbances.nodes)
    if disturbances.nodes > 1:
        check_nodes(config, disturbances.nodes)
    if disturbances.needs_net:
        check_possible()
    check_hidden(
        "--nat", disturbances.nat, config, forgets=any(fault.kind == "forget" for fault in faults)
    )
    check_hidden("--proxy", disturbances.proxy, config)
    if both := set(disturbances.nat) & set(disturbances.proxy):
        raise ConfigError(
            f"--nat, --proxy: island {min(both)} is given to both; give it to only one of them"
        )


def check_parts(faults: Sequence[Fault]) -> None:
    """Raise ConfigError if a fault hits a part of an island and this system cannot tell which
    processes belong to it.
    """
    for fault in faults:
        if fault.part is not None and not PROC.is_dir():
            raise ConfigError(
                f"--fault {fault}: a part of an island ({fault.part}) is found in {PROC}, "
                "which only Linux has, and not this system; leave out process= and node=, so that "
                "the whole island is hit, or run it on Linux"
            )


def check_hidden(
    option: str, hidden: Sequence[int], config: Config, *, forgets: bool = False
) -> None:
    """Raise ConfigError if these islands cannot be placed where only a relay reaches them."""
    if not hidden:
        return
    if not config.outer.network.has_routes:
        transport = config.outer.transport
        raise ConfigError(
            f"{option}: only tls has relays; outer.transport is {transport!r}, set it to tls"
        )
    if unknown := [index for index in hidden if not 0 <= index < len(config.islands)]:
        raise ConfigError(
            f"{option}: there is no island {unknown[0]}; islands are 0 to {len(config.islands) - 1}"
        )
    check_nat_possible(option, forgets=forgets)
