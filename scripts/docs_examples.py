"""An extension of mkdocstrings: examples in docstrings, which begin with >>>, are shown as code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .+(?:\n.+)*", re.MULTILINE)
"""From the first prompt to the next empty line."""


class ExamplesAsCode(griffe.Extension):
    """Puts a fence around each example; Markdown would take the prompts for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each class, function and module that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```python\n\g<0>\n```", obj.docstring.value)
