"""Inference by plain transformers: the reference that the native engine is tested against, and the slow way to
sample from an architecture that the native decoder does not know.

``core`` computes, ``loading`` opens model folders and published weights. Needs the extra ``transformers``.
"""
