"""Codecs by name."""

from collections.abc import Callable
from difflib import get_close_matches

from outer.codecs.base import Codec
from outer.codecs.cast import Bf16Codec, Fp16Codec, Fp32Codec
from outer.codecs.int8 import Int8Codec
from outer.errors import InputError

_BUILDERS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32Codec,
    "bf16": Bf16Codec,
    "fp16": Fp16Codec,
    "int8": Int8Codec,
}


def build_codec(name: str) -> Codec:
    """The codec called `name`. Raises InputError, with the choices, when there is none."""
    if name not in _BUILDERS:
        nearest = get_close_matches(name, _BUILDERS, n=1, cutoff=0.0)[0]
        raise InputError(f"unknown codec {name!r}; choose one of {', '.join(_BUILDERS)} (nearest: {nearest})")
    return _BUILDERS[name]()
