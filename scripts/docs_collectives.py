"""The diagrams of docs/collectives.md."""

COLLECTIVES = {}
