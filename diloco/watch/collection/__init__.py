"""Collect the records of a run from its islands over the network."""
