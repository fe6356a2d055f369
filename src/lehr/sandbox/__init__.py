"""Isolated execution of untrusted programs, usable on its own.

``base`` is the protocol, ``pool`` hands boxes out, each other singular file is a backend or a part of
one. To add a backend, implement :class:`lehr.sandbox.base.Backend`, register it under a name in
``base.BACKENDS`` (or the entry-point group ``lehr.sandbox``) and pass ``tests/contract/sandbox``.
"""
