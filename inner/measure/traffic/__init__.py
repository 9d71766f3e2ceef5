"""Predictions of the traffic between the ranks of an island in a step."""
