"""Inner steps of an island become rounds: of all islands (of_all.py), or of a quorum only (of_quorum.py)."""
