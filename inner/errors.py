"""What can go wrong inside an island."""


class InputError(ValueError):
    """The user's config or data cannot be used; the text says what, where, got, allowed and the cure."""


class TrainingStopped(RuntimeError):
    """The island must stop: too many non-finite steps in a row."""
