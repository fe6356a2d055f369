"""Inference behind one protocol: tokens in, tokens with log-probabilities out.

``base`` is the protocol, ``native`` the embedded engine, ``role`` runs an engine in a process of its own,
``remote`` is that engine seen from another process.
"""
