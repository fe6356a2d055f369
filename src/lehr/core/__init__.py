"""The nouns that every other package speaks: task, trace, reward, version, error, config.

Imports the standard library, numpy and pydantic only. A type belongs here when two packages that do
not import each other exchange it.
"""
