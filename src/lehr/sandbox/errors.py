"""The sandbox's own failures: those of the box or the request, never of the program that ran in it."""

from __future__ import annotations

from lehr.core.errors import LehrError


class SandboxError(LehrError, RuntimeError):
    """A box could not do what the host asked."""

    code = "sandbox"


class Refused(SandboxError):
    """A path or an artefact was refused for safety: a link, a device, too large, swapped."""

    code = "sandbox_refused"


class Absent(Refused):
    """There is no such file in the box."""

    code = "sandbox_absent"
