"""``lehr serve``: an OpenAI-compatible HTTP server over the embedded engine.

``requests`` reads bodies, ``work`` turns them into engine requests, ``text`` and ``tools`` turn tokens into
text and tool calls, ``responses`` writes them down, ``server`` is the Starlette application, ``listening``
runs it and ends it.
"""
