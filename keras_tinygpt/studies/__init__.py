"""Matched comparisons and the tables made from their results."""
