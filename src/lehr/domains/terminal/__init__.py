"""Domains that are played in a shell."""
