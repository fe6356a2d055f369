"""Models behind an OpenAI-compatible HTTP API, as ``core.completer.Completer``: messages in, text out.

``settings`` says which model, where and how fast; ``completer`` asks, ``pace`` keeps to the limits,
``refusals`` reads what came back instead of an answer, ``spent`` counts. Needs the extra ``openai``.
"""
