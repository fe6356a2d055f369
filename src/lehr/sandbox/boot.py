"""How an interpreter becomes process 1 of a box over its standard streams: it is told to load what comes in."""

from __future__ import annotations

import struct

from lehr.sandbox.channel import Channel

LOAD = """
import marshal, os, struct, sys, types
def exactly(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part: os._exit(0)
        data += part
    return data
for name, code in marshal.loads(exactly(struct.unpack("!I", exactly(4))[0])):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(code, name, "exec") if isinstance(code, str) else code, module.__dict__)
inside = sys.modules["lehr.sandbox.inside"]
"""


def program(part: str) -> str:
    """Return what to pass to ``python3 -c``. part: the module of ``inside`` that serves."""
    return f"{LOAD}inside.script.run(inside.{part}.serve())\n"


async def load(channel: Channel, code: bytes) -> None:
    """Have an interpreter that has just started load the runner and what scripts use."""
    _, ready = channel.expect(0)
    await channel.send_raw(struct.pack("!I", len(code)) + code)
    await ready
