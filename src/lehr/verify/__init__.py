"""Verifiers judge evidence in a fresh sandbox that the candidate has never seen.

To add a verifier, implement :class:`lehr.verify.base.Verifier` and register it in ``base.VERIFIERS``
(or the entry-point group ``lehr.verifier``).
"""
