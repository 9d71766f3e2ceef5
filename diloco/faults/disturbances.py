"""The faults and links that the command line requests, for islands that are processes or
modelled.
"""

from dataclasses import dataclass

from diloco.faults.spec import parse_fault


@dataclass(frozen=True)
class Disturbances:
    """Faults and links of a run, as on the command line.

    `storm` is the rate of random faults per island and minute.
    """

    faults: tuple[str, ...] = ()
    storm: float | None = None
    storm_seed: int = 0
    storm_count: int | None = None
    netns: bool = False
    links: tuple[str, ...] = ()
    nat: tuple[int, ...] = ()
    """Islands behind a NAT."""
    proxy: tuple[int, ...] = ()
    """Islands whose connections leave only through a proxy."""
    nodes: int = 1
    """Nodes of each island."""

    @property
    def has_faults(self) -> bool:
        """Whether any fault is injected."""
        return bool(self.faults) or self.storm is not None

    @property
    def needs_net(self) -> bool:
        """Whether the islands need network namespaces."""
        has_cut = any(parse_fault(spec).kind == "cut" for spec in self.faults)
        return self.netns or has_cut or bool(self.links or self.nat or self.proxy) or self.nodes > 1


NO_DISTURBANCES = Disturbances()
