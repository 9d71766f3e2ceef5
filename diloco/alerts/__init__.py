"""Alerts of an island to its operator: rules, what they watch, and how an alert is sent."""
