"""A stand-in for the run's model: one number per payload, together with the size of the real
payload.

Islands train, reduce, digest and transfer the stand-in with the real code. The counted bytes are
those of the real parts with the run's codec. If a model has very many parts, one payload of the
stand-in stands for several parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from inner.param_spec import ParamSlice, ParamSpec
from outer.codecs.choice import CodecChoice, build_codec_choice, build_space
from outer.config import CodingConfig, ExpertSharingConfig, MergeConfig, OuterConfig
from outer.network.endpoints import Leg, Tag
from outer.network.frames import HEADER_BYTES
from outer.space.layout import Part, Space

FP32_BYTES = 4
PARTS_PER_ISLAND = 4
MIN_PARTS = 16
"""Least number of parts. With fewer parts than islands, some islands reduce nothing, as in a real
run."""
MAX_WHOLE = 256
SHARERS = 64
"""Among more than MAX_WHOLE islands that all reduce, only SHARERS islands reduce, for all: see
`StandIn.share`."""


@dataclass(frozen=True)
class StandIn:
    """The small model, its outer config, and the sizes of the real parts for which it stands."""

    specs: tuple[ParamSpec, ...]
    config: OuterConfig
    sizes: dict[Leg, list[int]]
    """Bytes of each part's payload, headers included, by leg of the reduce."""
    part_bytes: int
    """Mean bytes of a part of the state as a donor sends it."""
    mean_bytes: int
    """Mean bytes of a part's encoded mean."""
    share: float = 1.0
    """Share of the reducers that reduce in the stand-in. Each of them also stands for other
    reducers: a payload that it receives or sends as a reducer stands for several payloads over
    links like its own, and this is its share of them."""

    def payload_bytes(self, tag: Tag) -> int:
        """Return the size of the payload with this tag."""
        return self.sizes[tag.leg][tag.part]


class StandInParams:
    """The local params of a virtual island: `outer.space.redistribute.Params` for a StandIn."""

    def __init__(self, specs: Sequence[ParamSpec], index: int) -> None:
        self.specs = specs
        self.slices = [
            ParamSlice(spec.name, *((0, size) for size in spec.matrix_shape)) for spec in specs
        ]
        self._values = [torch.zeros(spec.matrix_shape) for spec in specs]
        self._progress = 1e-3 * (1 + index)

    def read_all(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        return {index: self._values[index] for index in indices}

    def write_all(self, values: Mapping[int, torch.Tensor]) -> None:
        for index, new in values.items():
            self._values[index].copy_(new)

    def pinned(self, index: int) -> None:
        return None

    def live(self, index: int) -> torch.Tensor:
        return self._values[index]

    def train(self) -> None:
        """Make one inner step. Islands train at different speeds, so their pseudo-gradients
        differ.
        """
        for values in self._values:
            values += self._progress


def build_stand_in(specs: Sequence[ParamSpec], outer: OuterConfig, num_islands: int) -> StandIn:
    """Build the stand-in for a model with these parameters in a run of `num_islands` islands."""
    codecs = build_codec_choice(outer)
    real = build_space(specs, outer, codecs)
    by_fragment = [
        [p for p in real.parts if p.fragment == fragment] for fragment in range(real.num_fragments)
    ]
    is_shared = num_islands > MAX_WHOLE and min(map(len, by_fragment)) >= num_islands
    most = SHARERS if is_shared else max(MIN_PARTS, PARTS_PER_ISLAND * num_islands)
    small_specs = [
        ParamSpec(_name(f, len(by_fragment)), (min(len(p), most), 1))
        for f, p in enumerate(by_fragment)
    ]
    config = outer.model_copy(
        update={
            "codec": "fp32",
            "coding": CodingConfig(),
            "merge": MergeConfig(),
            "experts": ExpertSharingConfig(),
            "transport": "loopback",
            "fragment_pattern": "sequential",
            "part_elements": 1,
        }
    )
    small = build_space(small_specs, config)
    sizes = {leg: _sizes(by_fragment, small, codecs, leg) for leg in Leg}
    tensors = 2 if outer.optimizer.keeps_momentum else 1
    return StandIn(
        specs=tuple(small_specs),
        config=config,
        sizes=sizes,
        part_bytes=FP32_BYTES * tensors * real.num_elements // len(small.parts),
        mean_bytes=sum(sizes[Leg.GATHER]) // len(small.parts),
        share=SHARERS / num_islands if is_shared else 1.0,
    )


def _sizes(
    by_fragment: Sequence[Sequence[Part]], small: Space, codecs: CodecChoice, leg: Leg
) -> list[int]:
    """Return the bytes of each part of the stand-in: the sum over the real parts assigned to it in
    turn.
    """
    sizes = [0] * len(small.parts)
    for fragment, parts in enumerate(by_fragment):
        standing_in = [part.index for part in small.parts if part.fragment == fragment]
        for number, part in enumerate(parts):
            codec = codecs.codec_for(part) if leg is Leg.REDUCE else codecs.mean_codec_for(part)
            sizes[standing_in[number % len(standing_in)]] += HEADER_BYTES + codec.num_bytes(
                part.num_elements
            )
    return sizes


def _name(fragment: int, num_fragments: int) -> str:
    """Return a name that the sequential pattern puts into this fragment. The last fragment has what
    is in no layer.
    """
    return "rest" if fragment == num_fragments - 1 else f"layers.{fragment}"
