"""Images other than the host's: a root folder, an archive that is unpacked into one, or a declared image.

``/a/folder`` is used as it is. ``oci:/an/archive.tar`` (what skopeo and buildah write as ``oci-archive``) and
``docker:/an/archive.tar`` (what ``docker save`` writes) are unpacked once, under the digest of the archive. Any
other name is one that a file declares (:mod:`lehr.sandbox.images`), built once, under the digest of all that it
is made from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import image
from lehr.sandbox.images import declaration, digests, store
from lehr.sandbox.images import halt as halting
from lehr.sandbox.images.build import Ground, Say, build
from lehr.sandbox.images.declaration import OWN, Declared
from lehr.sandbox.images.store import DIGITS
from lehr.sandbox.images.workshop import OWN_FOLDER
from lehr.sandbox.launch import PATH

HOST = "host"
PYTHONS = ("usr/bin/python3", "usr/local/bin/python3")
KINDS = {"oci": "oci-archive", "docker": "docker-archive"}
UNPACK_S = 600.0
MOST_LINKS = 16


@dataclass(frozen=True, slots=True)
class Image:
    """What a box sees as its system.

    python: the interpreter inside. arguments: what lays it out, for bubblewrap. own: whether the interpreter
    is this host's, which can compile for it. env: variables of its programs, beside those of every box.
    """

    name: str
    python: str
    arguments: tuple[str, ...]
    own: bool
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def find(name: str, halt: Event | None = None) -> Image:
    """Return the image of a name; a declared one is built unless it was, which may take minutes.

    halt: see :func:`make`. Raises ``MissingDependency`` or ``HostUnfit`` with the next step, and what
    :func:`build` raises.
    """
    if name == HOST:
        return _of_host()
    ground = make(name, halt=halt)
    if ground.root is None:
        raise HostUnfit(f"the image {name!r} is empty", expected="an image with a root folder")
    if not ground.host:
        return replace(of_folder(name, ground.root), env=ground.env)
    host, own = _of_host(), f"/{OWN_FOLDER}"
    arguments = (*host.arguments, "--ro-bind", f"{ground.root}{own}", own)
    _open(name, ground.root)
    return Image(name, host.python, arguments, own=True, env=ground.env)


def make(name: str, say: Say = lambda _: None, halt: Event | None = None) -> Ground:
    """Unpack or build the image of a name unless that was done; return its root folder and what names it.

    say: hears what is done. halt: set by another thread, it ends that at once with ``Halted``. Raises as
    :func:`find` does.
    """
    kind, colon, path = name.partition(":")
    if name == HOST:
        return Ground(digests.of_host(), None, host=True)
    if colon and kind in KINDS:
        root = unpack(kind, Path(path), halt)
        return Ground(root.parent.name, root, host=False)
    if declaration.is_declared(name):
        declared = declaration.read(name)
        return Ground.of(build(declared, make(declared.layer.base, say, halt), say, halt))
    if name.startswith("/"):
        _refuse(name, Path(name))
        return Ground(digests.of_root(Path(name)), Path(name), host=False)
    raise HostUnfit(f"there is no image {name!r}", expected=declaration.KINDS)


def digest_of(declared: Declared) -> str:
    """Return what names a declared image, without building it or what it stands on."""
    base = declared.layer.base
    if declaration.is_declared(base):
        return digests.of_image(declared, digest_of(declaration.read(base)))
    kind, colon, path = base.partition(":")
    if colon and kind in KINDS:
        return digests.of_image(declared, _digest(Path(path))[:DIGITS])
    return digests.of_image(declared, make(base).digest)


def identity(name: str, halt: Event | None = None) -> str:
    """Return what names the content of an image. Makes it, as :func:`make` does; the name itself where only a
    backend can know it.
    """
    unknown = declaration.is_declared(name) and declaration.locate(name) is None
    return name if unknown else make(name, halt=halt).digest


def _of_host() -> Image:
    python = image.system_python()
    if python is None:
        raise MissingDependency(
            "no python3 in the system folders that a box may see",
            expected="/usr/bin/python3",
            hint="Install it: `apt-get install python3`",
        )
    return Image(HOST, python, image.arguments(), own=True)


def _refuse(name: str, root: Path) -> None:
    if not root.is_dir():
        raise HostUnfit(f"the image {name} is no folder", expected="a folder with usr, bin and so on in it")
    if root.resolve() in (Path("/"), Path.home().resolve(), Path.cwd().resolve()):
        raise HostUnfit(f"{root} cannot be an image: boxes would see all of it", expected="a folder of its own")


def _open(name: str, root: Path) -> None:
    if closed := [str(path) for path in (root, *root.resolve().parents) if not _open_to_boxes(path)]:
        raise HostUnfit(
            f"boxes, which run as users of their own, cannot reach the image {name} through {closed[0]}",
            expected="folders that everybody may pass",
            hint=f"`chmod o+x {' '.join(closed)}`, or keep the image elsewhere",
        )


def of_folder(name: str, root: Path) -> Image:
    """Return the image of a root folder: all of it read-only, but for what a box makes itself."""
    _refuse(name, root)
    _open(name, root)
    python = next((f"/{path}" for path in PYTHONS if _resolves(root, path)), None)
    if python is None:
        raise HostUnfit(
            f"the image {name} has no python3, which boxes need to run in",
            expected="python3 of version 3.10 or later at /usr/bin or /usr/local/bin",
            hint="Install python3 in the image",
        )
    out: list[str] = []
    for entry in sorted(root.iterdir()):
        if entry.name in OWN:
            continue
        if entry.is_symlink():
            out += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.is_dir():
            out += ["--ro-bind", str(entry), f"/{entry.name}"]
    return Image(name, python, (*out, *image.furniture()), own=False)


def _open_to_boxes(path: Path) -> bool:
    return os.geteuid() != 0 or bool(path.stat().st_mode & 0o001)


def _resolves(root: Path, path: str) -> bool:
    """Whether a path leads to a file without leaving ``root``, as seen from within."""
    here = path
    for _ in range(MOST_LINKS):
        whole = root / here
        parent = whole.parent.resolve()
        if not parent.is_relative_to(root.resolve()):
            return False
        if not whole.is_symlink():
            return whole.is_file() and os.access(whole, os.X_OK)
        target = os.readlink(whole)
        joined = target.lstrip("/") if target.startswith("/") else os.path.join(os.path.dirname(here), target)
        here = os.path.normpath(joined)
        if here.startswith(".."):
            return False
    return False


def _digest(archive: Path) -> str:
    try:
        with archive.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise HostUnfit(f"cannot read the image {archive}: {error.strerror}", expected="an archive") from error


def unpack(kind: str, archive: Path, halt: Event | None = None) -> Path:
    """Return the root folder of an archive, unpacked unless that was done before."""
    halt = halt or Event()
    digest = _digest(archive)
    place = store.images_folder() / digest[:DIGITS]
    root = place / store.ROOT
    if root.is_dir():
        return root
    skopeo, umoci = (shutil.which(name, path=PATH) for name in ("skopeo", "umoci"))
    if skopeo is None or umoci is None:
        lacking = "skopeo" if skopeo is None else "umoci"
        raise MissingDependency(
            f"{lacking} is not installed, which unpacks images",
            hint="Install both: `apt-get install skopeo umoci`",
        )
    store.make_ready()
    with store.building(digest) as folder:
        layout = f"{folder}/layout:image"
        _do(
            [skopeo, "--insecure-policy", "copy", "-q", f"{KINDS[kind]}:{archive}", f"oci:{layout}"],
            archive,
            halt,
        )
        rootless = [] if os.geteuid() == 0 else ["--rootless"]
        _do([umoci, "unpack", *rootless, "--image", layout, f"{folder}/bundle"], archive, halt)
        os.chmod(folder, 0o755)
        os.chmod(f"{folder}/bundle", 0o755)
        try:
            os.rename(f"{folder}/bundle", place)
        except OSError:  # another process was faster
            if not root.is_dir():
                raise
    return root


def _do(command: list[str], archive: Path, halt: Event) -> None:
    with tempfile.TemporaryFile() as printed:
        status = halting.run(
            command, halt, UNPACK_S, f"unpacking {archive}", stdout=subprocess.DEVNULL, stderr=printed
        )
        printed.seek(0)
        said = printed.read().decode(errors="replace").strip()[-300:]
    if status is None:
        raise HostUnfit(f"unpacking {archive} took more than {UNPACK_S:g} s")
    if status != 0:
        raise HostUnfit(f"cannot unpack the image {archive}: {said}", expected="an OCI or docker archive")
