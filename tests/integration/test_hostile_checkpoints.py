"""Every way to read a checkpoint that others could write: resuming, the commands, weights to start
from, the mirror.
"""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.checkpoints.mirror import Mirror
from diloco.checkpoints.signing import RunKeySigner
from diloco.cli.main import app
from diloco.config.init_weights import pin_weights_hash
from diloco.config.schema import load_config
from diloco.errors import ConfigError
from inner.checkpoint.folder import list_published
from inner.checkpoint.manifest import MANIFEST
from inner.errors import InputError
from outer.membership.rendezvous import serve_rendezvous
from outer.network.run_key import SEAL_MAGIC, read_run_key
from tests.inner.folders import spread_model, write_folder
from tests.inner.former_checkpoint import write_fitting_manifest
from tests.inner.hostile_checkpoint import CODE, REFUSALS, Runs, poison
from tests.swarm import Island, Swarm, swarm

SETTINGS = ["island.checkpoint.every_rounds=1", "island.checkpoint.keep=1", "outer.rounds=2"]
COMMANDS = {
    "export": lambda run: ["export", str(run), str(run / "export")],
    "evaluate": lambda run: ["evaluate", str(run), "--device", "cpu"],
    "generate": lambda run: ["generate", str(run), "--max-tokens", "3", "--device", "cpu"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A run of one island that has ended, without a run key."""
    with swarm(tmp_path_factory.mktemp("trained"), *SETTINGS, islands=[{}]) as made:
        made.start(0).finish()
        yield made


@pytest.fixture
def run(trained: Swarm, tmp_path: Path) -> Path:
    """A copy of the folder of that run."""
    return shutil.copytree(trained.folder / "test", tmp_path / "test")


def newest(run: Path) -> Path:
    return list_published(run / "island-0" / "checkpoints")[0][0].path


def sign(path: Path, key_file: Path) -> None:
    """Sign a manifest with this key, as an island that has it would have done."""
    path.write_bytes(RunKeySigner(read_run_key(key_file)).sign(path.read_bytes()))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_the_checkpoint_of_a_run(run: Path, command: str) -> None:
    done = CliRunner().invoke(app, COMMANDS[command](run), catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("how", CODE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_nothing_in_a_checkpoint(
    run: Path, tmp_path: Path, command: str, how: str
) -> None:
    poison(newest(run), how, tmp_path / "marker")
    done = CliRunner().invoke(app, COMMANDS[command](run))
    assert not (tmp_path / "marker").exists()
    assert isinstance(done.exception, InputError), done.exception
    with pytest.raises(InputError, match=REFUSALS[how]):
        raise done.exception


@pytest.mark.parametrize("how", ["code as the index", "code for an object"])
def test_an_island_that_resumes_runs_nothing_in_a_checkpoint(
    trained: Swarm, run: Path, tmp_path: Path, how: str
) -> None:
    poison(newest(run), how, tmp_path / "marker")
    with swarm(tmp_path, *SETTINGS, islands=[{}]) as made:
        island = made.start(0)
        assert island.wait() == [1]
    assert not (tmp_path / "marker").exists()
    assert REFUSALS[how] in island.log


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_run_that_starts_from_weights_runs_nothing_in_them(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "weights", spread_model())
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Runs(tmp_path / "marker")))
    (tmp_path / "run.yaml").write_text(f"model: {{init_from: {folder}}}\n")
    with pytest.raises(
        (ConfigError, InputError), match=r"other formats are pickles|fewer than its header"
    ):
        pin_weights_hash(load_config(tmp_path / "run.yaml"))
        # A file with the right name is hashed first and read when the model is built.
        CliRunner().invoke(
            app, ["export", str(folder), str(tmp_path / "out")], catch_exceptions=False
        )
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("how", CODE)
def test_a_mirror_runs_nothing_in_a_checkpoint(run: Path, tmp_path: Path, how: str) -> None:
    mirror = Mirror(str(tmp_path / "mirror"), keep=1)
    mirror.push(newest(run).parent)
    (copy,) = (tmp_path / "mirror").glob("step-*")
    poison(copy, how, tmp_path / "marker")
    shutil.rmtree(newest(run))
    assert mirror.pull(run / "island-0" / "checkpoints") == copy.name
    done = CliRunner().invoke(app, COMMANDS["export"](run))
    assert isinstance(done.exception, InputError) and not (tmp_path / "marker").exists()


def test_a_run_with_a_key_takes_no_unsigned_copy_of_a_mirror(
    run: Path, tmp_path: Path, key_file: Path
) -> None:
    Mirror(str(tmp_path / "mirror"), keep=1).push(newest(run).parent)
    mine = Mirror(str(tmp_path / "mirror"), 1, RunKeySigner(read_run_key(key_file)))
    with pytest.raises(
        InputError, match=r"none of its checkpoints can be used; .*not sealed with a run key"
    ):
        mine.pull(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    (manifest,) = (tmp_path / "mirror").glob("step-*/" + MANIFEST)
    sign(manifest, key_file)
    assert mine.pull(tmp_path / "empty") == manifest.parent.name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_checks_the_signature(
    run: Path, tmp_path: Path, key_file: Path, command: str
) -> None:
    def error(*options: str) -> str | None:
        done = CliRunner().invoke(app, [*COMMANDS[command](run), *options])
        return None if done.exception is None else str(done.exception)

    key, accept = ("--run-key-file", str(key_file)), "--accept-unsigned"
    assert (
        "not sealed with a run key" in (text := error(*key) or "") and "--accept-unsigned" in text
    )
    manifests = list((run / "island-0" / "checkpoints").glob("step-*/" + MANIFEST))
    for manifest in manifests:
        sign(manifest, key_file)
    assert error(*key) is None
    shutil.rmtree(run / "export", ignore_errors=True)
    assert (
        "sealed with a run key, and this island has none" in (text := error() or "")
        and "--run-key-file" in text
    )
    assert error(accept) is None
    shutil.rmtree(run / "export", ignore_errors=True)
    other = tmp_path / "other.key"
    other.write_text("o" * 32)
    assert "sealed with another run key, or altered" in (error("--run-key-file", str(other)) or "")
    assert all(path.read_bytes().startswith(SEAL_MAGIC) for path in manifests)


@pytest.fixture
def address(key_file: Path) -> Iterator[str]:
    """A rendezvous for islands with the key."""
    rendezvous = serve_rendezvous("127.0.0.1", 0, read_run_key(key_file))
    yield rendezvous.address
    rendezvous.close()


@pytest.mark.slow
def test_an_island_with_a_key_signs_and_resumes_from_nothing_else(
    tmp_path: Path, key_file: Path, address: str
) -> None:
    def start(*settings: str) -> Island:
        own = [*SETTINGS, f"island.run_key_file={key_file}", *settings]
        with swarm(tmp_path, *own, islands=[{}], address=address) as made:
            island = made.start(0)
            assert island.wait() in ([0], [1])
            return island

    start()
    assert len(start().events("resumed")) == 1, "its own signature is accepted"
    (manifest,) = tmp_path.glob(f"test/island-0/checkpoints/step-*/{MANIFEST}")
    assert manifest.read_bytes().startswith(SEAL_MAGIC)
    # The commands find the key in the run's config.
    assert CliRunner().invoke(app, COMMANDS["export"](tmp_path / "test")).exit_code == 0
    write_fitting_manifest(manifest.parent)
    refused = start()
    assert refused.wait() == [1] and len(refused.events("resumed")) == 1
    assert "island.checkpoint.accept_unsigned=true" in refused.log
    assert len(start("island.checkpoint.accept_unsigned=true").events("resumed")) == 2
