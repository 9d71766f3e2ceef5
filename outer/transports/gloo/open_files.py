"""The number of files that this process may open. gloo needs one per connection, and ends the
process if it gets none.
"""

import resource
from contextlib import suppress

MAX_FILES = 1 << 16
"""Upper bound of the limit. A higher one would slow down programs that check every possible
descriptor."""


def find_allowed_files() -> int:
    """Return the limit that a process of this user may set for itself, at most MAX_FILES."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_FILES)


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as the system allows, at most to
    MAX_FILES. Return the limit.
    """
    limit, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = find_allowed_files()
    if limit != resource.RLIM_INFINITY and wanted > limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
            return wanted
    return limit
