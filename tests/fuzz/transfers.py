"""What an island takes of others' states: parts and means of a donor, and what a checkpoint says
that others wrote.
"""

import hashlib
import io
import json
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoints.facts import IslandFacts, parse_island_facts
from diloco.checkpoints.signing import RunKeySigner
from diloco.runtime.progress import Progress, ResumePoint
from inner.checkpoint.folder import UNSIGNED, SavedCheckpoint
from inner.checkpoint.index import IndexRefused, parse_former, parse_index
from inner.checkpoint.manifest import (
    FORMER_INDEX,
    MANIFEST,
    FileSpec,
    Manifest,
    parse_manifest,
    write_manifest,
)
from inner.checkpoint.pickle_parser import PickleError
from inner.checkpoint.tensor_reader import load_chunk
from inner.errors import InputError as InnerInputError
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import OuterOptimizerConfig
from outer.errors import InputError, MessageError, PeerLost, TransportError
from outer.network.endpoints import Lane
from outer.network.messages import pack_carriers
from outer.network.run_key import RunKey
from outer.reduce.norm_zscore import History, parse_history, to_tensor
from outer.rounds.checkpoint import SavedFacts, parse_facts
from outer.space.layout import Space
from outer.state.global_state import GlobalState
from outer.state.part_state import PartState, Position, unpack
from outer.transfer.cache import PartsCache
from outer.transfer.donor import Description
from outer.transfer.donor_client import DonorClient
from outer.transfer.download_plan import DownloadPlan
from outer.transfer.part_fetcher import PartFetcher
from tests.fuzz.calls import calls_entry
from tests.fuzz.entries import Entries, Entry
from tests.fuzz.loop import LOOP
from tests.outer.donors import Spec, member

CHECKPOINT = Path(__file__).parents[1] / "inner/checkpoint/written_before/step-00000003"
SPACE = Space([Spec("w", (24,))], part_elements=8)
PARTS = [part.index for part in SPACE.parts]
SIZE = SPACE.parts[0].num_elements
CODEC = build_codec("bf16")
PLAN = DownloadPlan(SPACE, PARTS, build_uniform_choice(CODEC), OuterOptimizerConfig())
RUN_KEY = RunKey(b"k" * 32)
FOLDER = Path(tempfile.mkdtemp(prefix="diloco-fuzz-"))
MOST_REPLIES = 6
INDEX_SECONDS = 0.1
"""It is read when an island begins, by a parser of pickles in Python."""
DOWNLOAD_SECONDS = 0.1
"""A download uses threads, and several replies."""


def build_transfers() -> Entries:
    """An entry for each thing that is taken from others."""
    facts = json.dumps({"facts": {"a": [1, None]}}).encode()
    manifest = write_manifest(Manifest(3, {"a": 1}, {"w": "AdamW"}), UNSIGNED).partition(b"\n")[2]
    kept = (CHECKPOINT / MANIFEST).read_bytes().partition(b"\n")[2]
    histories = [History(3.0, 1.0), History(200.0, 1.0, 0.5, 0.1, 1.0)]
    return {
        "part": Entry(partial(_unpack, True), [_state().pack(0)]),
        "part of a moment": Entry(partial(_unpack, False),
        [b'{"round":3,"tokens":7}\n' + bytes(4 * SIZE)]),
        "download": Entry(
            _download, list(_downloads()), (TransportError,), is_json=True,
            most_seconds=DOWNLOAD_SECONDS
        ),
        "cached part": Entry(_read_cache, [_cached()], ()),
        "calls": calls_entry(),
        "facts": Entry(_parse_facts, [_facts(), facts], (InputError,), is_json=True),
        "facts of an island": Entry(_parse_island_facts, [_island_facts()], (InnerInputError,),
        is_json=True),
        "manifest": Entry(_parse_manifest, [manifest, kept], (InnerInputError,), is_json=True),
        "manifest with a signature": Entry(
            _parse_signed_manifest,
            [write_manifest(Manifest(3, {}, {}), RunKeySigner(RUN_KEY)),
            (CHECKPOINT / MANIFEST).read_bytes()],
            (InnerInputError, InputError),
        ),
        "index": Entry(
            _parse_former,
            [(CHECKPOINT / FORMER_INDEX).read_bytes()],
            (PickleError, IndexRefused),
            most_seconds=INDEX_SECONDS,
        ),
        "chunk": Entry(_load_chunk, list(_chunks()), (InnerInputError,)),
        "history of norms": Entry(_parse_history, [_raw(to_tensor(each)) for each in histories],
        (InputError,)),
        "index in JSON": Entry(_parse_index, [_index()], (IndexRefused,), is_json=True),
    }  # fmt: skip


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _values(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {part.index: torch.randn(part.num_elements, generator=generator) for part in SPACE.parts}


def _state() -> GlobalState:
    """A donor's state after two rounds, with the means of both."""
    state = GlobalState(_values(0), PLAN.optimizer)
    for number in (1, 2):
        payloads = {i: CODEC.encode(each) for i, each in _values(number).items()}
        means = {i: CODEC.decode(each, SPACE.parts[i].num_elements) for i, each in payloads.items()}
        state.commit(means, Position(round=number, tokens=10 * number), payloads, num_given=2)
    return state


def _unpack(has_momentum: bool, body: bytes) -> None:
    position, part = unpack(body, SIZE, has_momentum=has_momentum)
    assert part.params.shape == (SIZE,) and part.momentum.shape == (SIZE if has_momentum else 0,)
    assert part.params.isfinite().all() and part.momentum.isfinite().all()
    assert position.round == part.round


class _Donor:
    """The messenger of a joiner whose calls a donor answers with what an input holds, one reply
    after the other.
    """

    address = "joiner"

    def __init__(self, description: bytes, replies: list[bytes]) -> None:
        self._description, self._replies = description, iter(replies)

    async def call(
        self,
        address: str,
        kind: str,
        body: bytes,
        *,
        timeout_seconds: float,
        lane: Lane = "control",
        longest: int = 0,
    ) -> bytes:
        reply = self._description if kind == "state" else next(self._replies, None)
        if reply is None or len(reply) > (longest or len(reply)):
            raise PeerLost(address, "it has ended")
        return reply

    def on_malformed(self, address: str, cause: str) -> None:
        """The donor is not called again after a few."""


def _downloads() -> Iterator[bytes]:
    """A donor that gives part 0 at once, one by a part and two means, and one that is busy."""
    state = _state()
    part, means = (
        b"part\n" + state.pack(0),
        [b"mean\n" + (state.mean(0, number) or b"") for number in (0, 1)],
    )
    old = b"part\n" + GlobalState(_values(0), PLAN.optimizer).pack(0)
    for target, replies in (
        (2, [part]),
        (0, [old]),
        (2, [b"busy\n"]),
        (2, [b"gone\n"]),
        (0, [b"behind\n"]),
    ):
        yield _download_body(target, replies, holds=False)
    yield _download_body(2, means, holds=True)
    yield _download_body(2, [means[0], b"gone\n", part], holds=True)


def _download_body(target: int, replies: list[bytes], *, holds: bool) -> bytes:
    description = Description(
        digest="0" * 32,
        position=Position(round=2, tokens=20),
        fingerprint=SPACE.fingerprint,
        carriers=pack_carriers([0] * len(PARTS)),
    )
    texts = [reply.decode("latin-1") for reply in replies]
    return json.dumps(
        {
            "description": description.model_dump(mode="json"),
            "replies": texts,
            "target": target,
            "holds": holds,
        }
    ).encode()


def _download(body: bytes) -> None:
    """A joiner, which may hold the part of round 0, takes part 0 at the target's round from one
    donor.
    """
    try:
        values = json.loads(body)
        replies = [text.encode("latin-1") for text in values["replies"]][:MOST_REPLIES]
        description, target, holds = (
            json.dumps(values["description"]).encode(),
            values["target"],
            values["holds"],
        )
        assert type(target) is int and 0 <= target < 8
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        raise MessageError("no download") from None
    messenger: Any = _Donor(description, replies)

    async def main() -> PartState | None:
        donor = DonorClient(member("a", ["a"]), messenger, SPACE)
        await donor.update_description()
        fetcher = PartFetcher(PLAN)
        if holds:
            fetcher.parts[0] = PartState(_values(0)[0], torch.zeros(SIZE), 0)
        is_there = await fetcher.fetch(donor, 0, 0, target, lambda: 0.0)
        return fetcher.parts[0] if is_there else None

    part = LOOP.run_until_complete(main())
    if part is not None:
        assert part.round >= target and part.params.shape == (SIZE,)
        assert holds or part.params.isfinite().all()


def _cached() -> bytes:
    PartsCache(FOLDER, "f" * 32, "run").write(0, PartState(_values(0)[0], _values(1)[0], 3))
    return (FOLDER / "part-000000").read_bytes()


def _read_cache(raw: bytes) -> None:
    (FOLDER / "part-000000").write_bytes(raw)
    part = PartsCache(FOLDER, "f" * 32, "run").read(0, SIZE)
    assert part is None or (part.params.isfinite().all() and part.params.shape == (SIZE,))


def _facts() -> bytes:
    facts = SavedFacts(
        position=Position(round=2, tokens=20),
        digest="0" * 32,
        fingerprint="0" * 32,
        weights=[3],
        last_rounds=[(0, 1)],
        share=0.5,
    )
    return facts.model_dump_json().encode()


def _parse_facts(body: bytes) -> None:
    facts = parse_facts(_json(body))
    assert isfinite(facts.share)
    assert parse_facts(json.loads(facts.model_dump_json())) == facts


def _json(body: bytes) -> Any:
    """The values of a manifest, which is parsed as JSON before."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("no JSON") from None


def _island_facts() -> bytes:
    point = {"steps": 3, "made": {"steps": 3, "tokens": 30}}
    values = {"outer": json.loads(_facts()), "place": point, "tokens": 30, "run": {"name": "run"}}
    return json.dumps(
        values | {"params": [["w", [24]]], "reading_order": 2, "losses": [3.5, 3.25]}
    ).encode()


def _parse_island_facts(body: bytes) -> None:
    try:
        values = _json(body)
        if not isinstance(values, dict):
            raise InputError("no facts")
    except InputError as error:
        raise InnerInputError(str(error)) from None
    facts = parse_island_facts(SavedCheckpoint(Path("step-00000003"), Manifest(3, values, {})))
    assert isinstance(facts, IslandFacts)
    assert facts.place == ResumePoint(
        facts.place.steps, Progress(facts.place.made.steps, facts.place.made.tokens)
    )
    assert all(map(isfinite, facts.losses)), "a loss that is not finite comes through"


def _parse_manifest(text: bytes) -> None:
    """Whoever writes a manifest gives it the hash that fits."""
    manifest = parse_manifest(
        hashlib.sha256(text).hexdigest().encode() + b"\n" + text, "step-00000003", UNSIGNED
    )
    again = parse_manifest(write_manifest(manifest, UNSIGNED), "step-00000003", UNSIGNED)
    assert again == manifest, "a manifest is another one once it has been written"


def _parse_signed_manifest(raw: bytes) -> None:
    manifest = parse_manifest(raw, "step-00000003", RunKeySigner(RUN_KEY))
    assert write_manifest(manifest, RunKeySigner(RUN_KEY)), "signed with the key"


_MANIFEST = parse_manifest((CHECKPOINT / MANIFEST).read_bytes(), str(CHECKPOINT), UNSIGNED)


def _parse_former(raw: bytes) -> None:
    index = parse_former(raw, _MANIFEST)
    assert all(place.file in _MANIFEST.files for place in index.places.values())


_RAW = Manifest(3, {}, {}, {"rank-0.tensors": FileSpec(100), "index.json": FileSpec(100)})


def _index() -> bytes:
    chunks = [
        {"file": "rank-0.tensors", "start": 64 * row, "offsets": [row, 0], "sizes": [1, 3]}
        for row in (0, 1)
    ]
    tensors = {"params/w": {"dtype": "float32", "shape": [2, 3], "chunks": chunks}}
    return json.dumps({"tensors": tensors}).encode()


def _parse_index(raw: bytes) -> None:
    index = parse_index(raw, _RAW)
    assert (
        sum(
            saved.size.numel() * saved.properties.dtype.itemsize for saved in index.tensors.values()
        )
        <= 100
    )


def _chunks() -> Iterator[bytes]:
    """Tensors as a checkpoint's files hold them."""
    for tensor in (
        torch.arange(6.0).view(2, 3),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.empty(0),
    ):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        yield stream.getvalue()


def _load_chunk(raw: bytes) -> None:
    try:
        tensor = load_chunk(raw)
    except Exception as error:  # noqa: BLE001 - torch and zipfile raise many types, and its caller refuses all of them
        raise InnerInputError(type(error).__name__) from None
    assert tensor.untyped_storage().nbytes() <= len(raw), "it has more bytes than the file"


def _parse_history(raw: bytes) -> None:
    numbers = struct.unpack("<5d", raw[:40].ljust(40, b"\0"))
    history = parse_history(torch.tensor(numbers, dtype=torch.float64))
    assert all(map(isfinite, history))
