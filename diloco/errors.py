"""Errors of the user that every command reports as one message, without a traceback."""

FINAL_STATUS = 78
"""Exit status of a rank that must not be started again (EX_CONFIG of sysexits.h)."""


class ConfigError(ValueError):
    """The config cannot be used. The text says which value, where, what is allowed and how to fix
    it.
    """


class FolderInUse(ConfigError):
    """Another running island uses the folder."""
