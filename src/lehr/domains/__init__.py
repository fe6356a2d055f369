"""Task domains: one folder each with ``domain.toml``, and the environments that run their episodes.

``domain.toml`` is read without importing anything; the code behind it is loaded when a task runs.
"""
