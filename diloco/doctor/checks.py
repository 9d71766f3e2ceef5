"""The result of a check of `diloco doctor`."""

from dataclasses import dataclass
from typing import Literal

CheckLevel = Literal["ok", "warning", "FAILED"]


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found and, if it is not ok, what to do."""

    level: CheckLevel
    name: str
    text: str
