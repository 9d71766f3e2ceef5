"""The page of a run as one file with its data, which opens without a server and can be sent by
mail.
"""

import json
import re
from pathlib import Path
from typing import Any

from diloco.watch.server import PAGE
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from inner.files import write_atomically

SCRIPT = re.compile(r'<script src="page/([\w.-]+)" defer></script>\n')
STYLE = re.compile(r'<link rel="stylesheet" href="page/([\w.-]+)">')
UNSAVED = ("control.js",)
"""Scripts that need a server."""


def write_page(run_dir: Path, path: Path) -> None:
    """Write the page of the run in a folder, as it is now. Raises InputError if the folder holds no
    run.
    """
    prediction = RunPrediction(RunView(run_dir))
    snapshot = prediction.view.snapshot(prediction.view.read())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, build_page({"snapshot": snapshot, "predicted": prediction.find()}))


def build_page(data: dict[str, Any]) -> str:
    """Return the page with its styles, scripts and data in one text. `data`: a snapshot and a
    prediction.
    """
    text = (PAGE / "index.html").read_text()
    text = STYLE.sub(lambda found: f"<style>\n{(PAGE / found[1]).read_text()}</style>", text)
    scripts = [name for name in SCRIPT.findall(text) if name not in UNSAVED]
    text = SCRIPT.sub("", text)
    # Text from peers is part of the data: without "<" nothing in it can end the element.
    values = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    code = "".join(f"<script>\n{(PAGE / name).read_text()}</script>\n" for name in scripts)
    return text.replace(
        "</body>",
        f'<script type="application/json" id="saved-run">{values}</script>\n{code}</body>',
    )
