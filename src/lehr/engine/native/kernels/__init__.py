"""Compiled functions for what runs between the matrix products of a step."""
