"""Inference behind one protocol: tokens in, tokens with log-probabilities out.

``base`` is the protocol, ``native`` the embedded engine, ``transformers`` one for every other family; ``local``
drives either in this process, ``opening`` picks. ``role`` runs an engine in a process of its own, ``remote`` is
that engine seen from another process, ``router`` makes several look like one. ``openai`` is no engine: it asks
models in messages.
"""
