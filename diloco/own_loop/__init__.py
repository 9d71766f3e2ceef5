"""Islands around a training loop that is not ours: `diloco.Islands`, a few lines in a loop of one's own."""
