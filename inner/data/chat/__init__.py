"""Conversations as training data: `data.format: chat`. The loss counts the assistant's words
only.
"""
