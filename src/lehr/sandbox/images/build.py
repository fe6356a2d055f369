"""Builds a declared image: once for what it is made from, in a folder that is renamed when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from lehr.core.errors import ConfigError, DeadlineExceeded, HostUnfit, MissingDependency
from lehr.sandbox import image
from lehr.sandbox.images import digests, store
from lehr.sandbox.images import halt as halting
from lehr.sandbox.images.declaration import Declared, is_archive
from lehr.sandbox.images.store import Built
from lehr.sandbox.images.workshop import OWN_FOLDER, SHOP, BuildFailed, Workshop, need_root, own_pip

SITE = f"/{OWN_FOLDER}/lehr/site"
"""Where pip puts packages of an image that stands on the host, whose own folders are read-only."""
WAIT_S = 3600.0
"""Longest wait for another process that builds the same image."""
POLL_S = 0.1
PIP = (
    "python3", "-B", f"{SHOP}/python/pip/__pip-runner__.py", "install", "--no-input", "--no-cache-dir",
    "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore",
)  # fmt: skip
APT = """
apt-get -q update
apt-get -q install -y --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/*
"""
PLACE = """
import json, os, shutil, sys
def place(source, target):
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            place(f"{source}/{name}", f"{target}/{name}")
    else:
        shutil.copyfile(source, target)
        os.chmod(target, 0o755 if os.stat(source).st_mode & 0o111 else 0o644)
for source, target in json.loads(sys.argv[1]):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    place(source, target)
"""
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Ground:
    """What an image stands on, or what it is once it is built.

    digest: names it. root: its root folder; None for the bare host. host: whether the host's system folders are
    below it, so that ``root`` holds ``/opt`` alone. env: variables of its programs. packages: whether pip put
    something into a folder of its own.
    """

    digest: str
    root: Path | None
    host: bool
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    packages: bool = False

    @classmethod
    def of(cls, built: Built) -> Ground:
        """Return a built image as what others stand on."""
        return cls(built.digest, built.root, built.host, built.env, built.packages)


def build(declared: Declared, ground: Ground, say: Say = lambda _: None, halt: Event | None = None) -> Built:
    """Return the image, built unless that was done before; ``say`` hears what is done.

    Raises ``ConfigError`` and ``HostUnfit`` for what cannot be built here, ``BuildFailed`` for a step that
    failed, ``DeadlineExceeded`` when another process builds the same image for too long, ``Halted`` once
    ``halt`` is set by another thread.
    """
    halt = halt or Event()
    digest = digests.of_image(declared, ground.digest)
    if built := store.find(digest):
        return built
    _refuse(declared, ground)
    store.make_ready()
    with _only_builder(digest, declared.name, say, halt):
        if built := store.find(digest):
            return built
        say(f"building {declared.name}")
        with store.building(digest) as folder:
            return _build(declared, ground, digest, folder, say, halt)


def _refuse(declared: Declared, ground: Ground) -> None:
    layer = declared.layer
    if ground.host and layer.apt:
        raise ConfigError(
            f"{declared.name} asks for Debian packages ({', '.join(layer.apt)}) on the base {layer.base!r}",
            expected="a base with a system of its own: a root folder, or an archive",
            hint="Install them on the host, which the image then sees, or change `base`.",
        )
    outside = [where for where in layer.files if ground.host and not where.startswith(f"{OWN_FOLDER}/")]
    if outside:
        raise ConfigError(
            f"{declared.name} places {outside[0]!r} on the host's system folders, which are read-only",
            expected=f"a place below {OWN_FOLDER}/, or a base with a system of its own",
        )
    if layer.apt:
        need_root("apt")


@contextlib.contextmanager
def _only_builder(digest: str, name: str, say: Say, halt: Event) -> Generator[None]:
    """Hold the lock of an image's build. The kernel gives it back when its holder ends, however it ends."""
    file = os.open(store.log_of(digest), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        until, told = time.monotonic() + WAIT_S, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"another process has been building {name} for more than {WAIT_S:g} s",
                        hint=f"What it does is in {store.log_of(digest)}.",
                    ) from error
            if not told:
                say(f"another process builds {name}; waiting for it")
                told = True
            halt.wait(POLL_S)
            halting.check(halt, f"the wait for the build of {name}")
        yield
    finally:
        os.close(file)


def _build(declared: Declared, ground: Ground, digest: str, folder: Path, say: Say, halt: Event) -> Built:
    begun, layer, log = time.monotonic(), declared.layer, store.log_of(digest)
    log.write_text(f"{declared.key}, digest {digest}, on {layer.base}\n")
    shop = Workshop(declared.name, folder, ground.root, log, host=ground.host, halt=halt)
    env = {**ground.env, **layer.env}
    if layer.apt:
        say(f"apt: {' '.join(layer.apt)}")
        shop.do("apt", ["sh", "-ec", APT, "sh", *layer.apt], env=env, timeout_s=layer.timeout)
    packages = ground.packages or (ground.host and bool(layer.pip))
    if packages:
        path = env.get("PATH", image.ENVIRONMENT["PATH"])
        own = {"PYTHONPATH": SITE, "PATH": path if SITE in path else f"{SITE}/bin:{path}"}
        env = {**env, **own, **layer.env}
    if layer.pip:
        say(f"pip: {' '.join(layer.pip)}")
        _pip(declared, ground, shop, env)
    if layer.files:
        say(f"files: {' '.join(layer.files)}")
        sources = {
            f"files/{number}": path for number, path in enumerate(map(declared.source, layer.files.values()))
        }
        plan = [(f"{SHOP}/{name}", f"/{where}") for name, where in zip(sources, layer.files, strict=True)]
        argv = ["python3", "-I", "-c", PLACE, json.dumps(plan)]
        shop.do("files", argv, env=env, timeout_s=layer.timeout, binds=sources)
    for number, command in enumerate(layer.run, 1):
        say(f"run: {command}")
        shop.do(f"run {number}: {command}", ["sh", "-ec", command], env=env, timeout_s=layer.timeout)
    target = folder / "image"
    target.mkdir()
    target.chmod(0o755)
    try:
        own_bytes = shop.finish(target)
    except OSError as error:
        raise BuildFailed(
            f"cannot put {declared.name} together: {error}",
            expected="files that this user can read, and room for the layer",
            hint=f"What its steps printed is in {log}.",
        ) from error
    built = Built(
        name=declared.name,
        key=declared.key,
        digest=digest,
        base=layer.base,
        host=ground.host,
        env=env,
        packages=packages,
        how=shop.how,
        own_bytes=own_bytes,
        seconds=round(time.monotonic() - begun, 2),
        made_at=time.time(),
    )
    store.write(target, built)
    halting.check(halt, f"the build of {declared.name}")
    _put(target, built.root.parent)
    return built


def _put(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)
    except OSError as error:
        if store.find(place.name) is None:  # not another process that was faster
            raise HostUnfit(
                f"cannot move a built image to {place}: {error.strerror}",
                expected="a place where nothing else stands",
                hint=f"Remove {place}.",
            ) from error


def _pip(declared: Declared, ground: Ground, shop: Workshop, env: Mapping[str, str]) -> None:
    """Install with this interpreter's pip, run by the image's: an image needs none of its own."""
    pip = own_pip()
    if pip is None:
        raise MissingDependency(
            "pip is not installed beside lehr, which installs the packages of images",
            hint="Install it: `python -m ensurepip`",
        )
    layer = declared.layer
    archives = {entry: declared.source(entry) for entry in layer.pip if is_archive(entry)}
    places = {entry: f"archives/{number}/{path.name}" for number, (entry, path) in enumerate(archives.items())}
    binds = {"python/pip": pip, **{places[entry]: path for entry, path in archives.items()}}
    named = [f"{SHOP}/{places[entry]}" if entry in archives else entry for entry in layer.pip]
    where = ["--target", SITE, "--upgrade"] if ground.host else ["--break-system-packages"]
    shop.do("pip", [*PIP, *where, *named], env=env, timeout_s=layer.timeout, binds=binds)
