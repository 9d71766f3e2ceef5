"""Conversations as training data: `data.format: chat`. Loss is on the assistant's words only."""
