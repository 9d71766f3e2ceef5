"""Tokenizers of the `tokenizers` library: how they encode, and which of their tokens end and begin a document."""
