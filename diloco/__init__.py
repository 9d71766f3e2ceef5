"""The program: commands, configs, launcher, records, reports. Begin with island.py.

`diloco.Islands` and `diloco.data` serve other training loops (own_loop/). `inner` and `outer` are
imported from beside this package: from the checkout, or from `_bundled` in an installed wheel.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.own_loop.data import data as data
    from diloco.own_loop.islands import Islands as Islands


def _refuse_windows() -> None:
    """Raise ImportError on systems without the processes, signals and file locks of POSIX."""
    if os.name != "posix":
        raise ImportError(
            f"diloco does not run on this system ({sys.platform}): it needs the processes, signals "
            "and file locks of POSIX; use Linux, which Windows has in WSL 2"
        )


def _use_own_packages() -> None:
    """Make `import inner` and `import outer` find this project's packages.

    Other projects may have packages of these names. Raises ImportError if such a package has
    already been imported.
    """
    bundled = Path(__file__).parent / "_bundled"
    home = bundled if bundled.is_dir() else Path(__file__).parents[1]
    for name in ("inner", "outer"):
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and not (home / name / "__init__.py").samefile(loaded):
            raise ImportError(
                f"diloco needs its own package {name!r} ({home / name}), but another one has been "
                f"imported from {loaded}; import diloco first, or run the two in separate processes"
            )
    sys.path.insert(0, str(home))


_refuse_windows()
_use_own_packages()


def __getattr__(name: str) -> object:
    """Import `diloco.Islands`, `diloco.Masters` or `diloco.data` on first use.

    They need torch, and commands that do not need torch shall not wait for it.
    """
    if name == "Islands":
        from diloco.own_loop.islands import Islands

        return Islands
    if name == "Masters":
        from diloco.own_loop.islands import Masters

        return Masters
    if name == "data":
        from diloco.own_loop.data import data

        return data
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
