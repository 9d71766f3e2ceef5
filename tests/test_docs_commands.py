"""Every command and snippet in README and docs is one that exists: real parsers take them, with
their settings.

What no test can take stands below `<!-- not run: why -->`, which readers do not see. The log is
left out: it is dated, and tells of commands as they were. Most commands are run by other tests;
cheap ones are run here, those that take a second in the slow suite: `./scripts/test
tests/test_docs_commands.py -m slow`
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.schema import load_config, parse_config
from diloco.records.metrics import EvalRecord, Metrics
from tests.diloco.sample_records import a_round, a_step

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("log.md", "settings.md")]
MARK = re.compile(r"<!-- not run: \S.* -->")
FENCE = re.compile(r"^\s*```(\w*)\s*$")
INLINE = re.compile(
    r"`((?:\.venv/bin/)?diloco [a-z-]+(?: [^`]+)?|(?:\.venv/bin/)?(?:python -m "
    r")?(?:pytest|scripts\.)[^`]+)`"
)
DILOCO = re.compile(r"(?:^|[\s;])(?:\.venv/bin/|-m )?diloco (?=[a-z])(.*)")
NOT_OURS = ("nft", "torchrun", "sbatch", "docker", "pip", "apt-get", "kubectl", "sky")
"""Programs of which a block must be marked, or hold a command of ours."""
STAND_INS = {"ADDRESS": "tcp://127.0.0.1:31337", "$k": "0", "=K": "=0", "--nat ISLAND": "--nat 1"}
PACKAGES = ("diloco", "inner", "outer", "examples")
NEEDS_AN_EXPORT = "model.init_from=exports/"
CHEAP = ("config", "init", "mesh", "settings")
"""Commands that only read and print, or write some small files."""
QUICK = ("key", "launch-files", "plan", "report", "status")
"""Commands of seconds, which the slow suite runs: of a run that is there, or of none."""
FOR_KUBERNETES = ["outer.transport=tls", "island.relays=[relay.example.org:31400]"]
"""What the stand-in of a config lacks there."""
NOT_RUN = {
    "bootstrap": "serves until it is stopped: tests/diloco/swarm",
    "doctor": "needs a swarm at the address: tests/diloco/doctor",
    "evaluate": "needs a trained run or an export: tests/diloco/checkpoints",
    "experiment": "trains for minutes to hours: tests/diloco/experiments, on smaller files",
    "export": "needs a trained run: tests/diloco/checkpoints",
    "generate": "needs a trained run or an export: tests/diloco/checkpoints",
    "join": "needs a swarm at the address: tests/integration",
    "launch": "needs a swarm at the address: tests/integration",
    "prepare": "reads a corpus of gigabytes or an object store: tests/diloco/cli/test_prepare.py, "
    "on less text",
    "rehearse": "trains for minutes: tests/diloco/rehearsal has its parts",
    "relay": "serves until it is stopped: tests/integration/test_relays.py",
    "simulate": "trains for minutes, some as root: scripts/demo and tests/integration",
    "train": "is a rank that a launcher starts: tests/integration",
    "watch": "serves until it is stopped: tests/diloco/watch",
}
"""Why a command is only parsed here, and where it runs."""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    """Of a fenced block; `indented` for others."""
    lines: tuple[str, ...]
    is_marked: bool


@dataclass(frozen=True)
class Command:
    """A shell command somewhere on a page."""

    page: Path
    line: int
    text: str
    is_inline: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}:{self.text[:60]}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Fenced blocks, and indented ones after a blank line."""
    lines, number = page.read_text().splitlines(), 0
    while number < len(lines):
        first, fence = number, FENCE.match(lines[number])
        number += 1
        if fence:
            while number < len(lines) and not FENCE.match(lines[number]):
                number += 1
            body, language = lines[first + 1 : number], fence[1]
            number += 1
        elif lines[first].startswith("    ") and not lines[first - 1].strip():
            while number < len(lines) and (
                lines[number].startswith("    ") or not lines[number].strip()
            ):
                number += 1
            body, language = lines[first:number], "indented"
        else:
            continue
        before = next((line for line in reversed(lines[:first]) if line.strip()), "")
        yield Block(
            page,
            first + 1,
            language,
            tuple(line.strip() for line in body),
            bool(MARK.search(before)),
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [
    block
    for block in BLOCKS
    if block.language in ("indented", "", "sh", "bash") and not block.is_marked
]


def commands_in(block: Block) -> Iterator[Command]:
    """Its shell commands, each on one line and without comments."""
    text = "\n".join(block.lines).replace("\\\n", " ")
    for number, line in enumerate(text.splitlines()):
        bare = re.sub(r"(^|\s)#\s.*", "", line).strip().removeprefix("$ ").rstrip("& ")
        if bare.split(" ")[0] in ("nft", "sbatch"):
            continue
        if DILOCO.search(bare) or re.match(r"(\.venv/bin/)?(python|pytest)\b|\./|\.ci/", bare):
            yield Command(block.page, block.line + number, bare, is_inline=False)


def inline_commands(page: Path) -> Iterator[Command]:
    for number, line in enumerate(page.read_text().splitlines()):
        if not line.startswith("    "):
            for text in INLINE.findall(line):
                yield Command(page, number + 1, text, is_inline=True)


COMMANDS = [command for block in SHELL for command in commands_in(block)]
COMMANDS += [command for page in PAGES for command in inline_commands(page)]
OURS = [command for command in COMMANDS if DILOCO.search(command.text)]
OTHERS = [command for command in COMMANDS if not DILOCO.search(command.text)]


def words_of(command: Command) -> list[str]:
    """The words after `diloco`, with a value in place of each name in capitals."""
    found = DILOCO.search(command.text)
    assert found is not None
    text = re.sub(r"\{(\w+)(,\w+)+\}", r"\1", found[1])
    for name, value in STAND_INS.items():
        text = text.replace(name, value)
    words = [word for word in shlex.split(text) if word != "..."]
    config = "experiments/quick.yaml" if words[0] == "experiment" else "quickstart.yaml"
    is_stand_in = [
        word in ("CONFIG", "FILE", "FOLDER/experiment.yaml") or re.fullmatch(r"[\w-]+\.yaml", word)
        for word in words
    ]
    return [
        f"configs/{config}" if stands_in else word
        for word, stands_in in zip(words, is_stand_in, strict=True)
    ]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_is_taken_by_the_real_parser_with_its_settings(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    name, *words = words_of(command)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands, f"there is no command {name}"
    try:
        given = commands[name].make_context(name, words).params
    except Exception as error:
        if command.is_inline and type(error).__name__ in ("MissingParameter", "BadOptionUsage"):
            return  # a sentence names the command or an option, without their values
        raise AssertionError(f"diloco {name} {shlex.join(words)}: {error}") from error
    config = Path(given.get("config") or "configs/quickstart.yaml")
    assert config.exists(), f"{config} is not there"
    if name != "experiment" and given.get("overrides") and NEEDS_AN_EXPORT not in command.text:
        load_config(config, given["overrides"])


@pytest.mark.parametrize("command", [each for each in OURS if words_of(each)[0] in CHEAP], ids=str)
def test_a_cheap_command_runs(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    words = words_of(command)
    if "--dry-run" in words or (command.is_inline and len(words) < 3 and words[0] != "settings"):
        return
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{shlex.join(words)}: {done.output} {done.exception}"


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in OURS if words_of(each)[0] in QUICK], ids=str)
def test_a_quick_command_runs(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    words = words_of(command)
    asks_a_swarm = words[0] == "status" and any("://" in word for word in words)
    if asks_a_swarm or "RUN_DIR" in words or (command.is_inline and len(words) < 2):
        return  # the last two name a command in a sentence
    for folder in (Path(word) for word in words if word.startswith("runs/")):
        write_a_run(folder)
    if words[:2] == ["launch-files", "kubernetes"]:
        words += FOR_KUBERNETES
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{shlex.join(words)}: {done.output} {done.exception}"


def write_a_run(run_dir: Path) -> None:
    """A run of two islands, as `diloco report` and `diloco status` find it."""
    for name in ("island-0", "island-1"):
        metrics = Metrics(run_dir / name / "metrics.jsonl")
        for record in (
            a_step(1),
            a_round(0),
            EvalRecord(round=0, tokens=1024, loss=2.5, bits_per_byte=None),
        ):
            metrics.write(record)
        metrics.close()


def test_each_command_of_the_docs_runs_here_or_says_why_not():
    names = {words_of(each)[0] for each in OURS}
    assert names <= {*CHEAP, *QUICK, *NOT_RUN}
    assert not NOT_RUN.keys() & {*CHEAP, *QUICK}


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_scripts_modules_and_paths_of_other_commands_are_there(command: Command):
    words = shlex.split(re.sub(r"[][|]", " ", command.text))
    for word in words:
        if re.match(r"(\./)?(scripts|tests|examples|\.ci)/", word):
            assert (ROOT / word).exists(), f"{word} is not there"
    module = next((word for word in words if word.startswith("scripts.")), None)
    if module is not None:
        path = ROOT / module.replace(".", "/")
        sources = sorted(path.glob("*.py")) or sorted(path.parent.glob("*.py"))
        text = "".join(source.read_text() for source in sources)
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{module} is not there"
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in text, f"{module} has no {flag}"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.page.name}:{block.line}")
def test_a_block_with_programs_of_others_says_why_it_is_not_run(block: Block):
    if block.lines and block.lines[0].split(" ")[0] in NOT_OURS:
        assert list(commands_in(block)), f"put <!-- not run: why --> above line {block.line}"


def test_a_mark_stands_above_a_block():
    marked = sum(block.is_marked for block in BLOCKS)
    assert marked == sum(len(MARK.findall(page.read_text())) for page in PAGES) > 0


def raw_text(block: Block) -> str:
    """The block with its indentation, but for that of all lines."""
    lines = block.page.read_text().splitlines()
    begin = block.line - 1 if block.language == "indented" else block.line
    cut = 4 if block.language == "indented" else 0
    return "\n".join(line[cut:] for line in lines[begin : begin + len(block.lines)])


def snippets() -> dict[str, str]:
    """Python in the pages, and the tutorials, which only the slow suite runs."""
    tutorials = {
        path.name: path.read_text() for path in sorted((ROOT / "docs/tutorials").glob("*.py"))
    }
    return tutorials | {
        f"{each.page.name}:{each.line}": raw_text(each)
        for each in BLOCKS
        if each.language == "python"
    }


@pytest.mark.parametrize("name", snippets())
def test_python_in_the_docs_is_python_and_imports_what_is_there(name: str):
    for node in ast.walk(ast.parse(snippets()[name])):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in PACKAGES
        ):
            path = ROOT / node.module.replace(".", "/")
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = source.read_text() if source.exists() else ""
            assert [
                each.name for each in node.names if not re.search(rf"\b{each.name}\b", text)
            ] == [], node.module


@pytest.mark.parametrize(
    "block",
    [each for each in BLOCKS if each.language in ("yaml", "indented")],
    ids=lambda each: f"{each.page.name}:{each.line}",
)
def test_yaml_in_the_docs_has_settings_that_exist(block: Block):
    text = raw_text(block)
    # One with a base is an experiment file: tests/diloco/experiments reads those.
    is_config = (
        re.match(r"(name|data|model|optimizer|outer|island):", block.lines[0])
        and "base:" not in text
    )
    if block.page.name == "experiments.md" or not is_config:
        return
    parse_config(yaml.safe_dump(yaml.safe_load(text)), [], where=f"{block.page.name}:{block.line}")
