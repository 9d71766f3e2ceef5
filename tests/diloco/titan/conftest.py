"""torchtitan looks for its device while it is imported, so it is told first that it is a CPU."""

from importlib.util import find_spec

if find_spec("torchtitan"):
    from tests.diloco.titan.on_cpu import use_cpu

    use_cpu()
