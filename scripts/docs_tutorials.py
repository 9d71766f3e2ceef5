"""Runs tutorials, keeps what each of their cells prints, and makes pages of text, code and kept
output.

python -m scripts.docs_tutorials [NAME ...]    # runs them, all by default; keeps output and
                                               pictures in docs/
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
IMAGES = ROOT / "docs" / "images"
MARK = "----- cell {} -----"
"""Printed before a cell runs, so that its output can be told from that of the cell before."""
TEMPORARY = "/tmp"
"""What stands in kept outputs for the folder of temporary files of the machine that made them."""
SECONDS = 1800
"""A hang guard."""


def cells_of(tutorial: Path) -> list[tuple[str, str]]:
    """The cells of a tutorial in order: (kind, text), of kind `markdown` or `code`."""
    return [(cell.cell_type, cell.source) for cell in jupytext.read(tutorial).cells]


def code_digest(tutorial: Path) -> str:
    """The SHA-256 of a tutorial's code. Its words may be mended without another run."""
    code = [text for kind, text in cells_of(tutorial) if kind == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def outputs_path(tutorial: Path) -> Path:
    """Where the outputs of a tutorial are kept."""
    return tutorial.parent / "outputs" / f"{tutorial.stem}.json"


def run(tutorial: Path, folder: Path) -> list[str]:
    """Run a tutorial in an empty folder, where its pictures then lie. Returns what each code cell
    printed.
    """
    code = [text for kind, text in cells_of(tutorial) if kind == "code"]
    marked = [f"print({MARK.format(number)!r})\n{text}\n" for number, text in enumerate(code)]
    script = folder / tutorial.name
    script.write_text("\n".join(marked))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-u", str(script)]
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=SECONDS, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{tutorial.name} failed:\n{done.stdout}\n{done.stderr}")
    rest = done.stdout.replace(str(folder), TEMPORARY)
    outputs = []
    for number in range(1, len(code)):
        output, rest = rest.split(MARK.format(number) + "\n", 1)
        outputs.append(output)
    outputs.append(rest)
    outputs[0] = outputs[0].removeprefix(MARK.format(0) + "\n")
    return [output.rstrip() for output in outputs]


def record(tutorial: Path) -> None:
    """Run a tutorial; keep its outputs and its pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs = run(tutorial, folder)
        for picture in folder.glob("*.png"):
            (IMAGES / picture.name).write_bytes(picture.read_bytes())
    kept = {"code_sha256": code_digest(tutorial), "outputs": outputs}
    outputs_path(tutorial).parent.mkdir(exist_ok=True)
    outputs_path(tutorial).write_text(json.dumps(kept, indent=1) + "\n")


def page_of(tutorial: Path) -> str:
    """The page of a tutorial in Markdown: its text, its code, and below each cell what it has
    printed.
    """
    outputs = iter(json.loads(outputs_path(tutorial).read_text())["outputs"])
    parts = []
    for kind, text in cells_of(tutorial):
        if kind == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        output = next(outputs)
        if output:
            parts.append(f"``` {{.text .output}}\n{output}\n```")
    how = (
        f"`python docs/tutorials/{tutorial.name}` runs this page. Below each cell stands what "
        "it printed."
    )
    title, *others = parts
    heading, _, rest = title.partition("\n")
    return "\n\n".join([heading, how, rest.strip(), *others]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(path.stem for path in TUTORIALS.glob("*.py"))
    text = f"tutorials to run: any of {', '.join(known)}; default: all"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    for each in parser.parse_args().names or known:
        record(TUTORIALS / f"{each}.py")
        print(each)
