"""Domains whose answers are read from documents."""
