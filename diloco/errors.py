"""Errors of the user that every command reports as one message, without a traceback."""


class ConfigError(ValueError):
    """The config cannot be used. The text says which value, where, what is allowed and how to fix it."""


class FolderInUse(ConfigError):
    """Another running island uses the folder."""
