"""All groups of decoders."""

from collections.abc import Callable

from tests.fuzz.certificates import build_certificates
from tests.fuzz.codecs import build_codecs
from tests.fuzz.configs import build_configs
from tests.fuzz.entries import Entries
from tests.fuzz.frames import build_frames
from tests.fuzz.messages import build_messages
from tests.fuzz.records import build_records
from tests.fuzz.transfers import build_transfers

GROUPS: dict[str, Callable[[], Entries]] = {
    "messages": build_messages,
    "frames": build_frames,
    "codecs": build_codecs,
    "records": build_records,
    "certificates": build_certificates,
    "transfers": build_transfers,
    "configs": build_configs,
}
SHARES = {"configs": 0.03}
"""What a group gets of the executions of the others, if not as many: parsing YAML takes
milliseconds.
"""
