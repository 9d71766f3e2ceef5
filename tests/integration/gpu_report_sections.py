"""Sections of a report that go wrong."""

import os
import time
from collections.abc import Iterator

from scripts.gpu_report.place import Place, Row


def crash(place: Place) -> Iterator[Row]:
    yield {"name": "before", "value": 1}
    os.abort()


def hang(place: Place) -> Iterator[Row]:
    yield {"name": "before", "value": 1}
    time.sleep(1000)


def differ(place: Place) -> Iterator[Row]:
    print("a library says something")
    yield {"name": place.device, "ok": False}
