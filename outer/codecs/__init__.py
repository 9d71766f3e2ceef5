"""Codecs, which encode parts for the wire; `build_codec` looks them up by name."""

from collections.abc import Callable
from difflib import get_close_matches

from outer.codecs.base import Codec
from outer.codecs.cast import Bf16Codec, Fp16Codec, Fp32Codec
from outer.codecs.e3m0 import E3m0Codec
from outer.codecs.int4 import Int4Codec
from outer.codecs.int8 import Int8Codec
from outer.codecs.lowrank import LowrankCodec
from outer.codecs.own_codec import build_own_codec
from outer.codecs.stat2 import Stat2Codec
from outer.codecs.topk import TopkCodec
from outer.config import CodingConfig
from outer.config.own_code import is_import_path
from outer.errors import InputError

DEFAULT_CODING = CodingConfig()
_BUILDERS: dict[str, Callable[[CodingConfig], Codec]] = {
    "fp32": lambda coding: Fp32Codec(),
    "bf16": lambda coding: Bf16Codec(),
    "fp16": lambda coding: Fp16Codec(),
    "int8": lambda coding: Int8Codec(),
    "int4": lambda coding: Int4Codec(stochastic=coding.rounding == "stochastic"),
    "e3m0": lambda coding: E3m0Codec(),
    "stat2": lambda coding: Stat2Codec(),
    "topk": lambda coding: TopkCodec(coding.top_k, coding.chunk_elements, coding.value_bits),
    "lowrank": lambda coding: LowrankCodec(coding.rank),
}


def build_codec(name: str, coding: CodingConfig = DEFAULT_CODING) -> Codec:
    """Build the codec called `name`, or the user's own codec if `name` is an import path.

    Raises InputError, which lists the names, if there is no such codec, or if own code does not do
    what a codec must.
    """
    if is_import_path(name):
        return build_own_codec(name, coding.options)
    if name not in _BUILDERS:
        nearest = get_close_matches(name, _BUILDERS, n=1, cutoff=0.0)[0]
        raise InputError(
            f"unknown codec {name!r}; choose one of {', '.join(_BUILDERS)} (nearest: {nearest})"
        )
    return _BUILDERS[name](coding)
