"""SGLang as an engine, over HTTP. Written after the source of release 0.5.23; not run against a real server.

``settings`` says how a server runs, ``launch`` starts one or attaches to one, ``dialect`` speaks to it.
"""
