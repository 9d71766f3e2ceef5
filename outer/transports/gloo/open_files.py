"""How many files this process may open. gloo needs one for each connection, and ends the process if it gets none."""

import resource
from contextlib import suppress

MAX_FILES = 1 << 16
"""More would only make programs slow that look at every descriptor that could be open."""


def find_allowed_files() -> int:
    """The limit that a process of this user may give itself, at most MAX_FILES."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_FILES)


def allow_many_files() -> int:
    """Let this process open as many files as the system allows it, at most MAX_FILES. Returns the limit."""
    limit, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = find_allowed_files()
    if limit != resource.RLIM_INFINITY and wanted > limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
            return wanted
    return limit
