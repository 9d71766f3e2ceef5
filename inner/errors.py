"""What can go wrong inside an island."""


class InputError(ValueError):
    """The user's config or data cannot be used; the text says what, where, got, allowed and the cure."""


def nearest_multiples(value: int, unit: int) -> str:
    """For a cure: the multiples of `unit` around a value that is none, for example `8192 or 12288`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


class TrainingStopped(RuntimeError):
    """The island must stop: too many non-finite steps in a row."""
