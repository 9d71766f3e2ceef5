"""The settings that an island chooses for itself when it starts: island.auto."""
