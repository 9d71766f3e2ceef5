"""Islands around a training loop that is not part of this project: `diloco.Islands`, a few lines in
your own loop.
"""
