"""Checkpoints that others have written: nothing in them is run, and they get no more memory than
they have bytes.
"""

import json
import pickle
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from inner.checkpoint.folder import list_published
from inner.checkpoint.index import IndexRefused, parse_index, read_index
from inner.checkpoint.manifest import FORMER_INDEX, INDEX, FileSpec, Manifest
from inner.checkpoint.pickle_parser import PickleError, parse_pickle
from inner.checkpoint.save_load import Checkpoints
from inner.errors import InputError
from tests.harness import run_ranks
from tests.inner.checkpoint_crash import Tiny, open_checkpoints, save_steps, with_checkpoints
from tests.inner.former_checkpoint import to_former_format, write_fitting_manifest
from tests.inner.hostile_checkpoint import CODE, REFUSALS, poison

WRITTEN_BEFORE = Path(__file__).parent / "written_before"


def saved_on_a_rank(rank: int, folder: Path) -> None:
    save_steps(open_checkpoints(folder), 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint by two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(saved_on_a_rank, 2, folder)
    return folder


def loaded(rank: int, checkpoints: Checkpoints, folder: Path) -> tuple[str, str]:
    """Type and text of the error that loading the newest checkpoint raises."""
    found = checkpoints.newest()
    assert found is not None
    with pytest.raises(Exception) as error:
        checkpoints.load(Tiny(99), found)
    return error.type.__name__, str(error.value)


@pytest.mark.parametrize("how", REFUSALS)
def test_a_hostile_checkpoint_is_refused_on_every_rank_and_runs_nothing(
    whole: Path, tmp_path: Path, how: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "checkpoints")
    poison(folder / "step-00000001", how, tmp_path / "marker")
    errors = run_ranks(with_checkpoints, 2, folder, loaded)
    assert not (tmp_path / "marker").exists()
    for kind, text in errors:
        assert kind == "InputError"
        with pytest.raises(InputError, match=REFUSALS[how]):
            raise InputError(text)


@pytest.mark.parametrize("how", CODE)
def test_the_hostile_pickles_of_these_tests_run_where_torch_reads_them(
    whole: Path, tmp_path: Path, how: str
) -> None:
    folder = shutil.copytree(whole / "step-00000001", tmp_path / "step-00000001")
    poison(folder, how, tmp_path / "marker")
    tensors = {
        f"params/{name}": param.detach()
        for name, param in Tiny(99).model_parts[0].named_parameters()
    }
    with suppress(CheckpointException):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert (tmp_path / "marker").exists()


def test_a_former_index_says_what_torch_reads_in_it(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "checkpoints")
    to_former_format(folder / "step-00000001")
    (checkpoint,), _ = list_published(folder)
    theirs = dcp.FileSystemReader(checkpoint.path).read_metadata()
    ours = read_index(checkpoint)
    assert ours.tensors == theirs.state_dict_metadata
    places = {(key.fqn, tuple(key.offset or ())): info for key, info in theirs.storage_data.items()}
    assert places.keys() == ours.places.keys()
    assert all(
        (place.file, place.start, place.length)
        == (places[key].relative_path, places[key].offset, places[key].length)
        for key, place in ours.places.items()
    )


class Before:
    """The training state of the checkpoint in written_before, before it is loaded."""

    def __init__(self) -> None:
        self.inner_step = 0
        self.model_parts = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 3))]
        self.optimizers = [torch.optim.AdamW(self.model_parts[0].parameters())]


def before_loaded(
    rank: int, checkpoints: Checkpoints, folder: Path
) -> tuple[Before, dict[str, Any], dict[str, Any]]:
    state, extra = Before(), {f"outer/params/{number}": torch.zeros(5) for number in range(2)}
    found = checkpoints.newest()
    assert found is not None
    facts = checkpoints.load(state, found, lambda names: extra)
    return state, extra, facts


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN_BEFORE, tmp_path / "checkpoints")
    state, extra, facts = run_ranks(with_checkpoints, 1, folder, before_loaded)[0]
    assert (state.inner_step, facts) == (3, {"written": "before indexes were parsed"})
    for number, param in enumerate(state.model_parts[0].parameters()):
        assert torch.equal(param.flatten(), torch.arange(float(param.numel())) + 100 * number)
        states = state.optimizers[0].state[param]
        assert states["step"] == 1 and torch.equal(states["exp_avg"], torch.full_like(param, 0.1))
    assert [values.tolist() for values in extra.values()] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_an_index_longer_than_its_tensors_is_not_read(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "checkpoints")
    path = folder / "step-00000001"
    to_former_format(path)
    (path / FORMER_INDEX).write_bytes(pickle.dumps(list(range(100_000))))
    write_fitting_manifest(path)
    (checkpoint,), _ = list_published(folder)
    with pytest.raises(InputError, match="more than the tensors that it lists"):
        read_index(checkpoint)


CHUNK = {"file": "rank-0.tensors", "start": 0, "offsets": [0, 0], "sizes": [2, 3]}
TENSOR = {"dtype": "float32", "shape": [2, 3], "chunks": [CHUNK]}
LISTED = Manifest(
    1,
    {},
    {},
    {INDEX: FileSpec(1 << 20), "rank-0.tensors": FileSpec(24), "rank-1.tensors": FileSpec(24)},
)
HUGE = {"shape": [1 << 20, 1 << 20], "chunks": [CHUNK | {"sizes": [1 << 20, 1 << 20]}]}
REFUSED: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not JSON"),
    "no object": ([TENSOR], "where an object is expected"),
    "no list of chunks": (TENSOR | {"chunks": {"0": CHUNK}}, "or no list of chunks"),
    "a dtype that is a function": (TENSOR | {"dtype": "load"}, "no known dtype"),
    "a dtype that is no text": (TENSOR | {"dtype": ["float32"]}, "no known dtype"),
    "a file outside": (TENSOR | {"chunks": [CHUNK | {"file": "../rank-0.tensors"}]},
    "not in the manifest"),
    "the index itself": (TENSOR | {"chunks": [CHUNK | {"file": INDEX}]}, "not in the manifest"),
    "a huge tensor": (TENSOR | HUGE, "more bytes in 'rank-0.tensors' than the file has"),
    "a chunk beyond the end": (TENSOR | {"chunks": [CHUNK | {"start": 8}]}, "more bytes in "
                                                                            "'rank-0.tensors'"),
    "a chunk before the start": (TENSOR | {"chunks": [CHUNK | {"start": -8}]}, "no place in it"),
    "a chunk at a half": (TENSOR | {"chunks": [CHUNK | {"start": 0.5}]}, "no place in it"),
    "a repeated chunk": (
        TENSOR | {"shape": [4, 3], "chunks": [CHUNK, CHUNK | {"file": "rank-1.tensors"}]},
        "do not add up",
    ),
    "a tensor with a hole": (TENSOR | {"shape": [4, 3]}, "do not add up"),
    "a chunk outside its tensor": (TENSOR | {"chunks": [CHUNK | {"offsets": [1, 0]}]},
    "lies outside its tensor"),
    "a size below nothing": (TENSOR | {"shape": [-2, -3]}, "where a list of sizes is expected"),
    "a size that is true": (TENSOR | {"shape": [True, 3]}, "where a list of sizes is expected"),
    "many dimensions": (TENSOR | {"shape": [1] * 9}, "where a list of sizes is expected"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_hostile_index_is_refused(how: str) -> None:
    value, reason = REFUSED[how]
    raw = value if isinstance(value, str) else json.dumps({"tensors": {"params/w": value}})
    with pytest.raises(IndexRefused, match=reason):
        parse_index(raw.encode(), LISTED)


def test_the_tensor_of_these_tests_is_read() -> None:
    index = parse_index(json.dumps({"tensors": {"params/w": TENSOR}}).encode(), LISTED)
    assert index.tensors["params/w"].size == (2, 3) and index.is_raw


def test_a_pickle_that_asks_for_a_huge_memo_is_refused_at_once() -> None:
    # Python's unpickler allocates 32 GB for this instruction.
    started_at = time.monotonic()
    with pytest.raises(PickleError, match="instruction LONG_BINPUT"):
        parse_pickle(b"\x80\x04Nr\xff\xff\xff\xff.", ())
    assert time.monotonic() - started_at < 60


@pytest.mark.parametrize(
    "value", [{"a": (1, -2, 3.5)[:2], "b": [None, True, "x"]}, [{}, (), [()] * 3], 1 << 40]
)
def test_plain_data_is_parsed_as_python_does(value: Any) -> None:
    found = parse_pickle(pickle.dumps(value, protocol=4), ())
    assert _as_dicts(found) == value


def _as_dicts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_dicts, value))
    return {k: _as_dicts(v) for k, v in value.items} if type(value).__name__ == "Pairs" else value
