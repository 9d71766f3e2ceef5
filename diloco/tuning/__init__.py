"""What an island chooses itself when it starts: island.auto."""
