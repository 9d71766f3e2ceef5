"""An own source is prepared like ours, and one that breaks the contract is refused before a run
starts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inner.config import DataConfig
from inner.data.corpus import Corpus, check_source, prepare_corpus
from inner.data.prepare import PrepareOptions
from inner.data.sources.build import build_source
from inner.data.sources.documents import is_heldout, read_from
from inner.data.tokenizer import BytesTokenizer
from inner.errors import InputError
from tests.own.sources import Tables

OWN = "tests.own.sources"


def config_of(name: str = "Tables", **values: Any) -> DataConfig:
    defaults = {"options": {"numbers": 40}} if "paths" not in values else {}
    return DataConfig.model_validate(
        {"source": f"{OWN}:{name}", "heldout_fraction": 0.2} | defaults | values
    )


def expected(numbers: int = 40) -> tuple[str, str]:
    """Training and held-out text."""
    texts = dict(Tables(numbers).documents())
    train = "".join(text for key, text in texts.items() if not is_heldout(key, 0.2))
    return train, "".join(text for key, text in texts.items() if is_heldout(key, 0.2))


def decoded(corpus: Corpus) -> tuple[str, str]:
    tokenizer, text = BytesTokenizer(), corpus.texts[0]
    train, heldout = (ids[:][ids[:] != corpus.eos_id] for ids in (text.train, text.heldout))
    return tokenizer.decode(list(map(int, train))), tokenizer.decode(list(map(int, heldout)))


@pytest.mark.parametrize("processes", [1, 2])
def test_its_documents_are_the_corpus_in_their_order(tmp_path: Path, processes: int) -> None:
    check_source(config_of())
    corpus = prepare_corpus(config_of(), tmp_path, PrepareOptions(processes=processes))
    assert decoded(corpus) == expected()


def test_options_and_fingerprint_choose_the_cache(tmp_path: Path) -> None:
    for config in (config_of(), config_of(), config_of(options={"numbers": 41})):
        prepare_corpus(config, tmp_path)
    assert len(list(tmp_path.glob("Tables-*"))) == 2


def test_places_come_by_paths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    config = config_of("Lines", paths=[str(tmp_path / "a.txt")], options={"skip": 1})
    corpus = prepare_corpus(config, tmp_path / "cache")
    assert "line 0" not in "".join(decoded(corpus)) and "line 49" in "".join(decoded(corpus))


def test_one_that_can_begin_in_its_middle_is_read_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = build_source(config_of("SeekableTables"))
    documents = list(source.documents())
    monkeypatch.delattr(f"{OWN}.Tables.documents")
    for number in (0, 7, 39):
        assert list(read_from(source, number, documents[number].place)) == documents[number:]


def test_a_mixture_has_own_sources_beside_ours(tmp_path: Path) -> None:
    entries = [
        {"name": "tables", "weight": 1, "source": f"{OWN}:Tables", "options": {"numbers": 40}},
        {
            "name": "more",
            "weight": 2,
            "source": f"{OWN}:Tables",
            "options": {"numbers": 30, "columns": 4},
        },
    ]
    corpus = prepare_corpus(
        DataConfig.model_validate({"mixture": entries, "heldout_fraction": 0.2}), tmp_path
    )
    assert [text.name for text in corpus.texts] == ["tables", "more"]
    assert np.array_equal(
        corpus.texts[0].train[:], prepare_corpus(config_of(), tmp_path).texts[0].train[:]
    )


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Table", {}, r"the nearest name is tests\.own\.sources:Tables"),
        ("Tables", {}, r"Tables\(numbers.*called with nothing it raised TypeError.*data\.options"),
        ("Tables", {"numbers": 0}, "has no document with text"),
        (
            "Shuffled",
            {"numbers": 3},
            r"document 0 .* is 'table/.', and when read again 'table/.'; the order",
        ),
        ("Restless", {"numbers": 3}, "fingerprint.* differs from call to call"),
        (
            "BeginsLate",
            {"numbers": 3},
            r"documents_from\(2\) .* begins with None, and pair 2 .* is 'table/2'",
        ),
        ("SameKeys", {"numbers": 3}, "several documents with the key 'key'"),
        ("TextsAlone", {"numbers": 3}, r"document 0 .* is str '0 x 1 = 0.*need a pair"),
        ("Breaks", {"numbers": 3}, r"failed in documents\(\): RuntimeError: the tape is torn"),
        ("NoFingerprint", {}, r"returns NoFingerprint without the method fingerprint\(\)"),
    ],
)
def test_a_source_that_breaks_the_contract_is_refused(
    name: str, options: dict[str, int], why: str
) -> None:
    with pytest.raises(InputError, match=f"(?s)^data.source: .*{why}"):
        check_source(config_of(name, options=options))
