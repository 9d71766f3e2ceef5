"""Turns inner steps into rounds of all islands (of_all.py), or of a quorum (of_quorum.py)."""
