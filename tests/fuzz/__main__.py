"""Fuzzes groups of decoders in turn, and goes on where an earlier call has ended.

    python -m tests.fuzz [GROUP ...] [--executions N] [--folder FOLDER] [--keep]

FOLDER (runs/fuzz) gets a folder for each group: corpus/, findings/ and progress.json. With --keep
the inputs that are needed for the coverage of each group are put into tests/fuzz/corpus/, and the
counts into executions.json there. It runs in an environment with atheris, which scripts/fuzz makes.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz.corpus import CORPUS, SEED_BYTES, kept_inputs, write_inputs, write_kept
from tests.fuzz.entries import seeds_of
from tests.fuzz.groups import GROUPS, SHARES

CHUNK = 250_000
"""Executions of one process. Then the next group has its turn."""
HANG_SECONDS = 120
TARGET = 10_000_000
EXECUTIONS = CORPUS / "executions.json"
ROOT = Path(__file__).parents[2]


@dataclass
class Progress:
    """How far the fuzzing of one group has come."""

    executions: int = 0
    seconds: float = 0.0
    edges: int = 0
    """Counters that some input has reached, of branches in the code and of outcomes."""
    features: int = 0
    """The same with how often one input reached them."""
    inputs: int = 0
    """In the corpus."""
    findings: int = 0
    by_entry: dict[str, int] = field(default_factory=dict)
    """Executions by decoder."""


def main(arguments: list[str]) -> None:
    """Fuzz the groups that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("groups", nargs="*", default=list(GROUPS), choices=[*GROUPS, []])
    parser.add_argument(
        "--executions", type=int, default=TARGET, help="of each group, with those of earlier calls"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "fuzz")
    parser.add_argument(
        "--keep", action="store_true", help="keep the inputs that are needed, and the counts"
    )
    given = parser.parse_args(arguments)
    groups = [Group(name, given.folder.absolute() / name) for name in given.groups]
    while unfinished := [
        group for group in groups if group.left(given.executions) > 0 and not group.has_crashed
    ]:
        for group in unfinished:
            group.fuzz(min(group.left(given.executions), CHUNK))
    for group in groups if given.keep else ():
        group.keep()


class Group:
    """One group and its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._corpus, self._findings, self._path = (
            folder / "corpus",
            folder / "findings",
            folder / "progress.json",
        )
        for each in (self._corpus, self._findings):
            each.mkdir(parents=True, exist_ok=True)
        self._launcher = folder / "launch"
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.drive",
            name,
            str(self._findings),
            str(self._launcher),
        ]
        self._launcher.write_text(
            f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {shlex.join(command)} "$@"\n'
        )
        self._launcher.chmod(0o755)
        self.has_crashed = False
        """Whether an input has ended the process, or hung: it is among the findings, and nothing
        more is tried here.
        """
        self.progress = (
            Progress(**json.loads(self._path.read_text())) if self._path.exists() else Progress()
        )

    def left(self, executions: int) -> int:
        """How many of the group's executions are left, if most groups have so many."""
        return round(executions * SHARES.get(self._name, 1.0)) - self.progress.executions

    def fuzz(self, number: int) -> None:
        """Fuzz with so many more inputs, and say how far the group has come."""
        self._write_known()
        self._fuzz_once(number)
        self._path.write_text(json.dumps(asdict(self.progress), indent=1) + "\n")
        shown = {key: value for key, value in asdict(self.progress).items() if key != "by_entry"}
        print(self._name, json.dumps(shown), flush=True)

    def _write_known(self) -> None:
        """Begin with the inputs that are there already."""
        write_inputs(self._corpus, [*seeds_of(GROUPS[self._name]()), *kept_inputs(self._name)])

    def _fuzz_once(self, number: int) -> None:
        began, progress = time.monotonic(), self.progress
        log = self._launch(f"-runs={number}", f"-max_len={SEED_BYTES}", str(self._corpus))
        if log is None:
            self.has_crashed = True
            progress.findings = len(list(self._findings.iterdir()))
            return
        progress.executions += int(re.findall(r"stat::number_of_executed_units: (\d+)", log)[-1])
        progress.seconds += time.monotonic() - began
        progress.edges, progress.features = map(int, re.findall(r"cov: (\d+) ft: (\d+)", log)[-1])
        progress.inputs = len(list(self._corpus.iterdir()))
        progress.findings = len(list(self._findings.iterdir()))
        for entry, count in json.loads((self._folder / "counts.json").read_text()).items():
            progress.by_entry[entry] = progress.by_entry.get(entry, 0) + count

    def _launch(self, *arguments: str) -> str | None:
        """Run libFuzzer. Returns what it has written, which is also in the folder, or None if an
        input has ended it.
        """
        artifacts = f"-artifact_prefix={self._findings}/"
        options = [
            "-print_final_stats=1",
            "-rss_limit_mb=8192",
            f"-timeout={HANG_SECONDS}",
            artifacts,
        ]
        log = self._folder / "log"
        with log.open("w") as file:
            command = [str(self._launcher), *options, *arguments]
            code = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            ).returncode
        text = log.read_text(errors="replace")
        if code:
            print(
                f"{self._name}: libFuzzer ended with {code}; {log} ends with\n{text[-2000:]}",
                flush=True,
            )
        return None if code else text

    def keep(self) -> None:
        """Keep the inputs that are needed for the coverage, and the counts."""
        self._write_known()
        merged = self._folder / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir()
        assert self._launch("-merge=1", str(merged), str(self._corpus)) is not None, (
            "all of them have been judged"
        )
        num_kept = write_kept(self._name, [path.read_bytes() for path in merged.iterdir()])
        found = json.loads(EXECUTIONS.read_text()) if EXECUTIONS.exists() else {}
        counts = asdict(self.progress) | {"kept": num_kept}
        EXECUTIONS.write_text(
            json.dumps(found | {self._name: counts}, indent=1, sort_keys=True) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
