"""vLLM as an engine: a server process in an environment of its own, spoken to over HTTP.

``settings`` says how it runs, ``launch`` starts one or attaches to one, ``dialect`` speaks to it, ``transfer``
brings it new weights, ``metrics`` reads what it says of itself. ``inside`` runs in vLLM's environment.
"""
