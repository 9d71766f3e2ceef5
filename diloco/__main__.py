"""`python -m diloco`: the same as the command `diloco`."""

from diloco.cli.main import main

main()
