"""What every backend must hold, as programs that attack a box and checks of what became of it.

Each case is an async function of one argument, the :class:`~lehr.sandbox.base.Boxes` to lease from; it returns
when the promise holds and raises :class:`NotHeld` when it does not. ``tests/contract/sandbox`` runs them on our
backends; a plug-in runs :data:`CASES` on its own. What a backend cannot do must show as a failing case.
"""

from lehr.sandbox.conformance.basis import NotHeld
from lehr.sandbox.conformance.collecting import COLLECTING
from lehr.sandbox.conformance.escape import ESCAPE
from lehr.sandbox.conformance.kernel import KERNEL
from lehr.sandbox.conformance.neighbours import NEIGHBOURS
from lehr.sandbox.conformance.resources import RESOURCES
from lehr.sandbox.conformance.sessions import SESSIONS

ALL = {**RESOURCES, **ESCAPE, **KERNEL, **NEIGHBOURS, **COLLECTING, **SESSIONS}
CASES = {name: ALL[name] for name in sorted(ALL, key=lambda name: int(name[1:].partition("-")[0]))}

__all__ = ["CASES", "NotHeld"]
