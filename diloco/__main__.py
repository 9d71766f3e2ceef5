"""`python -m diloco`: the same as the command `diloco`."""

from diloco.cli import main

main()
