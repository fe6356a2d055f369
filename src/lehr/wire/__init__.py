"""How the processes of a run talk: requests with ids, remaining time and typed failure, on ZeroMQ.

Roles dial home: the orchestrator binds (``home``), a role connects and serves (``service``). DEALER and
ROUTER sockets only; msgpack by msgspec; nothing is ever unpickled.
"""
