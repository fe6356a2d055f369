"""Domains whose answers are programs."""
