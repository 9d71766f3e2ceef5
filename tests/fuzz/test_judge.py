"""The fuzzer notices what it is there to notice, and its changes reach what is deep within an
input.
"""

import itertools
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from outer.errors import MessageError
from tests.fuzz import corpus
from tests.fuzz.corpus import kept_inputs, write_kept
from tests.fuzz.entries import Entries, Entry, join, seeds_of, split
from tests.fuzz.judge import MOST_BYTES, judge
from tests.fuzz.landmarks import MOST_OF_ENTRY, Landmarks
from tests.fuzz.mutator import Mutator


def refuse(body: bytes) -> None:
    raise MessageError(f"a message of {len(body)} bytes")


def burn(body: bytes) -> None:
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass


def fill(body: bytes) -> None:
    assert bytearray(2 * MOST_BYTES)[-1] == 0


def test_what_is_decoded_and_what_is_refused_by_a_declared_error_is_told_apart() -> None:
    assert judge(Entry(len, []), b"abc") == "decoded"
    assert (
        judge(Entry(refuse, []), b"abc")
        == judge(Entry(refuse, []), b"ab")
        == "MessageError: a message of  bytes"
    )


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (Entry(lambda body: body[9], []), IndexError, "out of range"),
        (Entry(refuse, [], (ValueError,)), MessageError, "3 bytes"),
        (Entry(burn, []), AssertionError, "ms of a processor"),
        (Entry(fill, [], most_seconds=1.0), AssertionError, "MB"),
        (Entry(len, [], is_refused=True), AssertionError, "nothing may be"),
    ],
)
def test_a_broken_promise_is_a_finding(entry: Entry, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        judge(entry, b"abc")


VALID = json.dumps({"round": 3, "islands": ["a", "b"], "proof": {"digest": "00ff"}}).encode()
ENTRIES: Entries = {"first": Entry(len, [VALID], is_json=True), "second": Entry(len, [b"\x00\x01"])}


def flip(data: bytes, most: int) -> bytes:
    """Stands for libFuzzer's own change."""
    return (data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")[:most]


def changes(data: bytes, count: int = 300) -> list[tuple[str, bytes]]:
    change = Mutator(ENTRIES, flip)
    return [split(ENTRIES, change(data, 400, seed)) for seed in range(count)]


def test_an_input_is_for_the_entry_that_it_names_and_any_other_input_is_for_some_entry() -> None:
    assert split(ENTRIES, join("second", b"a\nb")) == ("second", b"a\nb")
    assert {split(ENTRIES, bytes([number]))[0] for number in range(20)} == {"first", "second"}


def test_json_is_changed_value_by_value_and_now_and_then_as_bytes() -> None:
    bodies = [body for name, body in changes(join("first", VALID)) if name == "first"]
    values = [value for body in bodies if (value := _json(body)) is not None]
    assert len(values) > len(bodies) / 2
    assert len({json.dumps(value) for value in values}) > 50
    deep = [
        value["proof"]
        for value in values
        if isinstance(value, dict) and isinstance(value.get("proof"), dict)
    ]
    assert any(proof.get("digest") != "00ff" for proof in deep), (
        "what is within a message within is changed, too"
    )
    assert {name for name, _ in changes(join("first", VALID))} == {"first", "second"}


def _json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def test_what_is_compressed_is_changed_within() -> None:
    bodies = [
        body for name, body in changes(join("first", zlib.compress(VALID))) if name == "first"
    ]
    inflated = [found for body in bodies if (found := _inflated(body)) is not None]
    assert len(inflated) > len(bodies) / 2 and len({*inflated}) > 50
    assert len(inflated) < len(bodies), "the compressed bytes are damaged, too"


def _inflated(body: bytes) -> bytes | None:
    try:
        return zlib.decompress(body)
    except zlib.error:
        return None


def test_each_new_outcome_has_coverage_of_its_own_and_texts_without_end_do_not_use_it_up() -> None:
    reached: list[int] = []
    numbers = itertools.count()

    def instrument(mark: Callable[[], None]) -> Callable[[], None]:
        number = next(numbers)
        return lambda: reached.append(number)

    landmarks = Landmarks(instrument)
    for outcome in ("decoded", "refused", "decoded"):
        landmarks.reach("a", outcome)
    assert reached[0] == reached[2] != reached[1]
    for number in range(2 * MOST_OF_ENTRY):
        landmarks.reach("b", str(number))
    landmarks.reach("c", "decoded")
    assert len(reached) == 3 + MOST_OF_ENTRY + 1


def test_kept_inputs_are_read_as_they_were_and_the_longest_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CORPUS", tmp_path)
    assert kept_inputs("none") == []
    assert write_kept("some", seeds_of(ENTRIES)) == 2
    assert sorted(kept_inputs("some")) == sorted(seeds_of(ENTRIES))
    before = (tmp_path / "some.tar.xz").read_bytes()
    write_kept("some", reversed(seeds_of(ENTRIES)))
    assert (tmp_path / "some.tar.xz").read_bytes() == before
    monkeypatch.setattr(corpus, "MOST_KEPT_BYTES", 2000)
    noise = [zlib.compress(str(number).encode() * number) * number for number in range(1, 60)]
    assert 0 < write_kept("some", noise) < len(noise)
    assert max(map(len, kept_inputs("some"))) < max(map(len, noise))
