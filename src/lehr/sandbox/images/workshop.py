"""The box in which an image is built: bubblewrap around the new layer, with the network of the host.

Over a root folder the layer is overlayfs, mounted in a mount namespace of its own, by root or in a user
namespace; where the kernel or the file system allows neither, it is a copy. Over the host's system folders it
is ``/opt``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import image
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.images import halt as halting
from lehr.sandbox.images import merge
from lehr.sandbox.images.declaration import OWN
from lehr.sandbox.images.store import ROOT
from lehr.sandbox.launch import PATH

OWN_FOLDER = "opt"
"""What an image that stands on the host may fill: the host image has no such folder."""
SHOP = "/run/lehr"
"""Where a build finds what it is given."""
TRY_S = 30.0
COPY_S = 1800.0
TOLD_LINES, TOLD_BYTES = 12, 4096
LAY = """
mount --bind "$1" lower
mount -t overlay overlay -o "lowerdir=lower,upperdir=upper,workdir=scratch,$2" merged
shift 2
exec "$@"
"""
"""Relative names: a path may hold what overlayfs's options cannot."""
RIGHTS = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "SETFCAP", "SETGID", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""What installing packages takes; nothing over the host's devices, mounts or network."""
PASSED = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class BuildFailed(SandboxError):
    """A step of an image's build failed."""

    code = "image_build"


class Workshop:
    """Life cycle: made in an empty folder, :meth:`do` for each step, :meth:`finish`.

    name: of the image, for errors. base: the root folder of what the image stands on; None for the bare host.
    host: whether the host's system folders are below it all. log: what steps print goes there. halt: once it is
    set, the step at work is killed, and ``Halted`` raised.
    """

    def __init__(
        self, name: str, folder: Path, base: Path | None, log: Path, *, host: bool, halt: Event | None = None
    ) -> None:
        self._name = name
        self._folder = folder
        self._base = base
        self._host = host
        self._log = log
        self._halt = halt or Event()
        self._bwrap = shutil.which("bwrap", path=PATH)
        if self._bwrap is None:
            raise MissingDependency(
                "bubblewrap (bwrap) is not installed", hint="Install it: `apt-get install bubblewrap`"
            )
        self._laying = self._lay_out()

    @property
    def how(self) -> str:
        """``overlay`` or ``copy``; ``new`` where there is nothing below but the host."""
        return "overlay" if self._laying else "new" if self._base is None else "copy"

    def _lay_out(self) -> list[str]:
        """Prepare the new layer; return the command that mounts it, or nothing where it is a copy."""
        for name in ("lower", "upper", "scratch", "merged"):
            (self._folder / name).mkdir()
            (self._folder / name).chmod(0o755)
        if self._base is None:
            (self._folder / "merged" / OWN_FOLDER).mkdir()
            (self._folder / "merged" / OWN_FOLDER).chmod(0o755)
            return []
        (self._folder / "upper").chmod(stat.S_IMODE(self._base.stat().st_mode))
        laying = self._mounting()
        if laying and self._run([*laying, "true"], TRY_S, quiet=True) == 0:
            return laying
        held = [str(path) for path in self._base.iterdir() if path.name not in OWN]
        if held and self._run(["cp", "-a", "--reflink=auto", "--", *held, "merged"], COPY_S) != 0:
            raise BuildFailed(
                f"cannot copy {self._base}, on which {self._name} stands",
                expected="a folder that this user can read, and room for a copy of it",
                hint=self._look(),
            )
        return []

    def _mounting(self) -> list[str]:
        tools = [shutil.which(name, path=PATH) for name in ("unshare", "mount", "sh")]
        if not all(tools):
            return []
        unshare, _, sh = map(str, tools)
        root = os.geteuid() == 0
        spaces = ["--mount"] if root else ["--user", "--map-root-user", "--mount"]
        options = "redirect_dir=off,metacopy=off" if root else "userxattr"
        return [unshare, *spaces, "--propagation", "private", sh, "-ec", LAY, "sh", str(self._base), options]

    def do(
        self,
        step: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        binds: Mapping[str, Path] | None = None,
    ) -> None:
        """Run one step in the box. Raises ``BuildFailed`` that names it, how it ended and its last lines.

        binds: what it is given, read-only, by name below ``/run/lehr``.
        """
        self._note(f"\n== {step}")
        begun, start = time.monotonic(), self._log.stat().st_size
        status = self._run([*self._laying, *self._box(binds or {}, env), "--", *argv], timeout_s)
        last = self._last(start)
        ended = "ended for its time" if status is None else f"exit {status}"
        self._note(f"\n== {time.monotonic() - begun:.1f} s, {ended}")
        if status is None:
            raise BuildFailed(
                f"the step {step!r} of {self._name} took more than {timeout_s:g} s; it last said: {last}",
                expected="a step that ends in time",
                hint=f"Raise `timeout` of the image. {self._look()}",
            )
        if status != 0:
            raise BuildFailed(
                f"the step {step!r} of {self._name} ended with exit code {status}; it last said: {last}",
                expected="exit code 0",
                hint=self._look(),
            )

    def _note(self, line: str) -> None:
        with self._log.open("ab") as log:
            log.write(f"{line}\n".encode(errors="replace"))

    def _look(self) -> str:
        return f"All of it is in {self._log}."

    def _run(self, argv: Sequence[str], timeout_s: float, *, quiet: bool = False) -> int | None:
        """Run a program in the folder of the build; return its status, or None if it was ended for its time."""
        with self._log.open("ab") as log:
            out = subprocess.DEVNULL if quiet else log
            return halting.run(
                argv, self._halt, timeout_s, f"the build of {self._name}",
                stdout=out, stderr=out, env={"PATH": PATH}, cwd=self._folder, umask=0o022,
            )  # fmt: skip

    def _last(self, start: int) -> str:
        """Return the last lines that were printed since the log was ``start`` bytes long."""
        with self._log.open("rb") as log:
            log.seek(max(start, self._log.stat().st_size - TOLD_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()]
        return " | ".join(told[-TOLD_LINES:]) or "nothing"

    def _box(self, binds: Mapping[str, Path], env: Mapping[str, str]) -> list[str]:
        """Return bubblewrap's arguments for one step."""
        merged = self._folder / "merged"
        out = [str(self._bwrap), "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc"]
        out += ["--unshare-uts", "--cap-drop", "ALL"]
        if os.geteuid() == 0 or self._laying:
            out += [word for right in RIGHTS for word in ("--cap-add", f"CAP_{right}")]
        else:
            out += ["--unshare-user", "--uid", "0", "--gid", "0"]
        if self._host:
            out += [*image.arguments(), "--bind", str(merged / OWN_FOLDER), f"/{OWN_FOLDER}"]
            for number, (place, data) in enumerate(image.ETC_FILES):
                made = self._folder / f"etc-{number}"
                made.write_bytes(data)
                out += ["--ro-bind", str(made), place]
            out += ["--ro-bind-try", "/etc/ssl", "/etc/ssl"]
        else:
            out += ["--bind", str(merged), "/", "--proc", "/proc", "--dev", "/dev"]
        out += ["--perms", "0755", "--tmpfs", "/run", "--perms", "1777", "--tmpfs", "/tmp"]
        out += self._resolver()
        for name, path in binds.items():
            out += ["--ro-bind", str(path), f"{SHOP}/{name}"]
        variables = {**self._environment(), **env}
        for number, name in enumerate(CERTIFICATES):
            if (file := os.environ.get(name)) and os.path.isfile(file):
                out += ["--ro-bind", os.path.realpath(file), f"{SHOP}/certificates-{number}"]
                variables[name] = f"{SHOP}/certificates-{number}"
        out += ["--clearenv"]
        out += [word for item in variables.items() for word in ("--setenv", *item)]
        return [*out, "--chdir", "/"]

    def _environment(self) -> dict[str, str]:
        passed = {
            name: value
            for name, value in os.environ.items()
            if name.lower() in PASSED or (name.startswith("PIP_") and name not in CERTIFICATES)
        }
        return {
            **passed,
            "PATH": PATH,
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "DEBIAN_FRONTEND": "noninteractive",
        }

    def _resolver(self) -> list[str]:
        """Let the step find names as the host does, also where the image's file is a link."""
        ours = os.path.realpath("/etc/resolv.conf")
        if not os.path.isfile(ours):
            return []
        place = "/etc/resolv.conf"
        theirs = (self._base or self._folder) / "etc" / "resolv.conf"
        if not self._host and theirs.is_symlink():
            place = os.path.normpath(os.path.join("/etc", os.readlink(theirs)))
        return ["--ro-bind", ours, place]

    def finish(self, target: Path) -> int:
        """Make the image's root folder in ``target`` from what was built; return the bytes of the new layer."""
        merged = self._folder / "merged"
        if self._laying and self._base is not None:
            return merge.merge(self._base, self._folder / "upper", target / ROOT)
        own_bytes = sum(
            os.lstat(f"{top}/{name}").st_blocks << 9 for top, _, names in os.walk(merged) for name in names
        )
        os.rename(merged, target / ROOT)
        return own_bytes


@functools.cache
def own_pip() -> Path | None:
    """Return the folder of this interpreter's pip, which can run in any other interpreter, or None."""
    import importlib.util

    found = None
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("pip")
    folder = Path(found.origin).parent if found and found.origin else None
    return folder if folder and (folder / "__pip-runner__.py").is_file() else None


def need_root(step: str) -> None:
    """Raise ``HostUnfit`` unless this is root, whose files can belong to several users."""
    if os.geteuid() != 0:
        raise HostUnfit(
            f"{step} needs root: the files of packages belong to several users",
            hint="Build it as root (`sudo lehr images build …`), or on a base that has the packages",
        )
