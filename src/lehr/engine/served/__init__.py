"""Engines that someone else's HTTP server computes: what the adapters of such servers have in common.

``engine`` is the protocol over a ``dialect``, which says how one kind of server is spoken to; ``engine.vllm``
and ``engine.sglang`` have one each. ``http`` sends requests, ``process`` starts and ends a server, ``folders``
lays out published weights as a server reads them, ``values`` turns what it reports into a completion.
``inside`` runs in the server's environment and imports nothing of lehr. To add a server, write a dialect and a
function that opens an engine with it.
"""
