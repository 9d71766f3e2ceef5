"""Every codec that build_codec knows, with each setting that changes its payloads, and what is
around a codec.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args
from zlib import crc32

import torch

from outer.codecs import _BUILDERS, build_codec
from outer.codecs.base import Codec
from outer.codecs.choice import build_codec_choice, build_space
from outer.codecs.own_codec import OwnCodec
from outer.config import CodingConfig, GossipConfig, OuterConfig
from outer.gossip.shares import ShareCoding
from outer.gossip.step import Share
from outer.reduce.payloads import Payloads
from tests.fuzz.entries import Entries, Entry
from tests.outer.donors import Spec

SIZES = (0, 1, 2, 127, 128, 129, 300, 1025)
"""Elements of a part. The first byte of an input says which, and whether the payload keeps its own
length.
"""
OWN_LENGTH = 0x80
ENCODED_EVERY = 16
"""Of so many inputs the values of one are encoded again, which takes longer than decoding them."""
SMALL_CHUNKS = {"top_k": 5, "chunk_elements": 64, "rank": 3}
"""So that small parts have several chunks, and matrices more than full rank."""
Decode = Callable[[torch.Tensor], list[torch.Tensor]]
"""Decodes a payload. All values of the result must be finite."""


class CarelessCodec:
    """A user's own codec, which checks nothing."""

    def num_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(-60000, 60000).half().view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        assert payload.numel() % 256 != 254, "own code may raise anything"
        return payload.view(torch.float16).float()


def build_codecs() -> Entries:
    """An entry for each codec and setting, for own code, and for what is around a codec."""
    entries = {name: _build_entry(codec) for name, codec in codecs()}
    return entries | {"share of gossip": _share_entry(), "payload of a moment": _moment_entry()}


def codecs() -> Iterator[tuple[str, Codec]]:
    """(name, codec): all that there are."""
    for name in _BUILDERS:
        for bits in _choices("value_bits") if name == "topk" else [2]:
            for rounding in _choices("rounding") if name == "int4" else ["nearest"]:
                coding = CodingConfig.model_validate(
                    {"value_bits": bits, "rounding": rounding, **SMALL_CHUNKS}
                )
                yield f"{name} {bits} {rounding}", build_codec(name, coding)
    yield "own code", OwnCodec(CarelessCodec(), "CarelessCodec")


def _choices(setting: str) -> list[Any]:
    return list(get_args(CodingConfig.model_fields[setting].annotation))


def _build_entry(codec: Codec) -> Entry:
    seeds = []
    for number, size in enumerate(SIZES):
        payload = codec.encode(_values(size))
        seeds += [bytes([number]) + _raw(payload), bytes([OWN_LENGTH + number]) + _raw(payload)]
    return Entry(partial(_decode, codec), seeds)


def _values(size: int) -> torch.Tensor:
    """Values over many decades, some of them 0."""
    number = torch.arange(size, dtype=torch.float32)
    return torch.sin(number * 12.9898) * torch.exp(torch.sin(number * 0.37) * 20) * (number % 7 > 0)


def _decode(codec: Codec, body: bytes) -> None:
    choice = body[0] if body else 0
    size = SIZES[choice % len(SIZES)]
    payload = _payload(body[1:], codec.num_bytes(size), has_own_length=choice >= OWN_LENGTH)
    before = payload.clone()
    values = codec.decode(payload, size)
    assert values.dtype == torch.float32 and values.shape == (size,)
    assert values.isfinite().all(), "what is not finite comes through"
    assert torch.equal(payload, before), "a payload was changed"
    if crc32(body) % ENCODED_EVERY == 0:
        again = codec.decode(codec.encode(values.clone()), size)
        assert again.isfinite().all()


def _payload(raw: bytes, num_bytes: int, *, has_own_length: bool) -> torch.Tensor:
    """The payload in an input. Most are brought to the right size: others are refused at once."""
    fitted = raw if has_own_length else raw[:num_bytes].ljust(num_bytes, b"\x3f")
    return (
        torch.frombuffer(bytearray(fitted), dtype=torch.uint8)
        if fitted
        else torch.empty(0, dtype=torch.uint8)
    )


def _raw(payload: torch.Tensor) -> bytes:
    return payload.numpy().tobytes()


def _share_entry() -> Entry:
    gossip = GossipConfig()
    config = OuterConfig(codec="int8", gossip=gossip)
    codecs = build_codec_choice(config)
    space = build_space([Spec("w", (300,))], config, codecs)
    coding = ShareCoding(space, codecs, gossip.params)
    size = space.parts[0].num_elements
    valid = coding.encode(0, Share(_values(size), _values(size)))

    def decode(payload: torch.Tensor) -> list[torch.Tensor]:
        share = coding.decode(0, payload)
        return [share.pseudo_grad, share.params]

    return _part_entry(decode, valid, size)


def _moment_entry() -> Entry:
    config = OuterConfig(moments=(1, 1))
    space = build_space([Spec("w", (300,))], config)
    payloads = Payloads(build_codec_choice(config), space)
    bounds = next(part for part in space.parts if part.kind == "exp_avg_sq")
    part, size = bounds.index, bounds.num_elements
    valid = payloads.encode(part, _values(size).abs())

    def decode(payload: torch.Tensor) -> list[torch.Tensor]:
        values = payloads.decode(part, payload, "a")
        assert (values >= 0).all(), "a second moment below 0 comes through"
        return [values, payloads.decode_mean(part, payload, "a").values]

    return _part_entry(decode, valid, size)


def _part_entry(decode: Decode, valid: torch.Tensor, num_elements: int) -> Entry:
    """An entry for the payloads of one part, of which one is valid."""

    def decode_one(body: bytes) -> None:
        payload = _payload(body[1:], valid.numel(), has_own_length=body[:1] >= bytes([OWN_LENGTH]))
        for values in decode(payload):
            assert values.shape == (num_elements,) and values.isfinite().all()

    return Entry(decode_one, [b"\x00" + _raw(valid), b"\xff" + _raw(valid)])
