"""`python -m inner.dry_run`: read a Rehearsal as JSON from standard input and write its
RehearsalResult to the output.

If the input is wrong, it prints one line to standard error and exits with status 1.
"""

import sys

from pydantic import TypeAdapter

from inner.dry_run.case import Rehearsal, RehearsalResult
from inner.dry_run.rehearsal import rehearse
from inner.errors import InputError


def main() -> int:
    case = TypeAdapter(Rehearsal).validate_json(sys.stdin.buffer.read())
    try:
        result = rehearse(case)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(TypeAdapter(RehearsalResult).dump_json(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
