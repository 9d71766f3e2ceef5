"""What `diloco plan` shows of a mixture: the bytes that an island sends, by layer and group of
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.cost import bytes_by_tensor
from outer.space.experts import group_experts


@dataclass(frozen=True)
class SentContent:
    """What an island sends per cycle of some of the model's tensors, as a mean over cycles."""

    what: str
    num_bytes: float


def list_sent(
    outer: OuterConfig, specs: Sequence[ParamSpec], num_islands: int
) -> list[SentContent]:
    """Return what an island sends of a mixture: the experts of each layer, or of several layers
    that send equally much, then one group of experts, then the rest. Empty for a model without
    experts.
    """
    groups = group_experts(specs, outer.experts.group)
    if not groups:
        return []
    sent = bytes_by_tensor(outer, specs, num_islands)
    by_group = {group: sum(sent[name] for name in names) for group, names in groups.items()}
    by_layer: dict[int, float] = {}
    for group, num_bytes in by_group.items():
        by_layer[group.layer] = by_layer.get(group.layer, 0.0) + num_bytes
    of_experts = sum(by_layer.values())
    largest, num_bytes = max(by_group.items(), key=lambda each: each[1])
    return [
        *_by_layers(by_layer),
        SentContent(
            f"  of it a group of {largest.num_experts} of a layer (outer.experts.group)", num_bytes
        ),
        SentContent("all experts", of_experts),
        SentContent("everything else", sum(sent.values()) - of_experts),
    ]


def share_of_experts(
    outer: OuterConfig, specs: Sequence[ParamSpec], num_islands: int
) -> float | None:
    """Return the share of experts in the bytes that an island sends; None if it sends none."""
    sent = bytes_by_tensor(outer, specs, num_islands)
    experts = sum(sent[spec.name] for spec in specs if spec.expert is not None)
    return experts / sum(sent.values()) if sum(sent.values()) else None


def _by_layers(by_layer: dict[int, float]) -> list[SentContent]:
    """Return a line for each run of neighbouring layers whose experts send equally many bytes."""
    rows = []
    for num_bytes, run in groupby(sorted(by_layer), key=lambda layer: round(by_layer[layer])):
        layers = list(run)
        if len(layers) == 1:
            rows.append(SentContent(f"experts of layer {layers[0]}", num_bytes))
        else:
            rows.append(
                SentContent(f"experts of each of layers {layers[0]} to {layers[-1]}", num_bytes)
            )
    return rows
