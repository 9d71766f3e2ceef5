"""Tokenizers of the `tokenizers` library: how they encode, and which of their tokens begin and end
a document.
"""
