"""Images that are not this host's: root folders and archives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from lehr.core.errors import HostUnfit, LehrError
from lehr.sandbox import roots
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.images import store


def in_image(name: str, *commands: list[str]) -> list[bytes]:
    async def run() -> list[bytes]:
        backend = BwrapBackend()
        try:
            box = await backend.create(Spec(image=name, limits=Limits(wall_s=20.0)))
            outputs: list[bytes] = []
            for command in commands:
                result = await box.exec(command)
                outputs.append(result.stdout + result.stderr)
            mark = await box.snapshot()
            await box.restore(mark)
            await box.destroy()
            return outputs
        finally:
            await backend.close()

    return asyncio.run(run())


def test_a_root_folder_is_what_a_box_sees(root: Path) -> None:
    listing, release, data, forked, started, write = in_image(
        str(root),
        ["ls", "/"],
        ["cat", "/etc/os-release"],
        ["cat", "/opt/data"],
        ["python3", "-c", "import json, sys; print(json.dumps(sys.path[1:]))"],
        ["env", "python3", "-c", "import json, sys; print(json.dumps(sys.path[1:]))"],
        ["sh", "-c", "echo x > /opt/data; echo x > /work/x; cat /work/x"],
    )
    assert set(listing.decode().split()) >= {"dev", "etc", "opt", "proc", "run", "tmp", "usr", "work"}
    assert release == b"NAME=own\n" and data == b"of the image\n"
    assert json.loads(forked) == json.loads(started)
    assert b"Read-only" in write and write.startswith(b"x\n")
    assert (root / "opt/data").read_text() == "of the image\n"


def test_two_images_have_boxes_at_once(root: Path) -> None:
    async def run() -> None:
        backend = BwrapBackend()
        one, two = await asyncio.gather(backend.create(Spec()), backend.create(Spec(image=str(root))))
        assert (await two.exec(["cat", "/opt/data"])).stdout == b"of the image\n"
        assert (await one.exec(["cat", "/opt/data"])).exit_code == 1
        for box in (one, two):
            await box.destroy()
        await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "there is no image 'nowhere'"),
        ("/does/not/exist", "is no folder"),
        ("/", "boxes would see all of it"),
        ("oci:/does/not/exist.tar", "cannot read the image"),
        ("docker:relative", "cannot read the image"),
    ],
)
def test_an_image_that_cannot_be_is_named(name: str, words: str) -> None:
    with pytest.raises(HostUnfit, match=words):
        roots.find(name)


def test_an_image_without_an_interpreter_is_refused(place: Path) -> None:
    (place / "usr/bin").mkdir(parents=True)
    with pytest.raises(HostUnfit, match="has no python3"):
        roots.find(str(place))
    (place / "usr/bin/python3").symlink_to("../../../../../../usr/bin/python3")
    with pytest.raises(HostUnfit, match="has no python3"):
        roots.find(str(place))


@pytest.mark.skipif(os.geteuid() != 0, reason="other host: boxes of an ordinary user are that user")
def test_a_folder_that_boxes_cannot_pass_is_named(place: Path) -> None:
    (place / "closed" / "root").mkdir(parents=True)
    (place / "closed").chmod(0o700)
    with pytest.raises(HostUnfit, match=f"cannot reach the image .* through {place}/closed"):
        roots.find(f"{place}/closed/root")


@pytest.mark.skipif(
    shutil.which("skopeo") is None or shutil.which("umoci") is None,
    reason="other host: skopeo or umoci is missing",
)
def test_an_archive_is_unpacked_once(root: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_HOME", str(place / "home"))
    layout, archive = place / "layout", place / "image.tar"
    for command in (
        ["umoci", "init", "--layout", layout],
        ["umoci", "new", "--image", f"{layout}:latest"],
        ["umoci", "insert", "--image", f"{layout}:latest", root, "/"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(archive, "w") as tar:
        for item in sorted(layout.iterdir()):
            tar.add(item, item.name)
    (data,) = in_image(f"oci:{archive}", ["cat", "/opt/data"])
    assert data == b"of the image\n"
    ((kept, _),) = store.kept()
    before = kept.stat().st_mtime_ns
    in_image(f"oci:{archive}", ["cat", "/opt/data"])
    assert kept.stat().st_mtime_ns == before
    archive.write_bytes(b"no archive at all")
    with pytest.raises(LehrError, match="cannot unpack the image"):
        roots.find(f"oci:{archive}")
    assert {path.name for path in (place / "home/images").iterdir()} == {kept.name, "logs"}


def test_what_a_killed_unpacking_left_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_HOME", str(place / "home"))
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    monkeypatch.setattr(roots, "_do", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    (place / "image.tar").write_bytes(b"an archive")
    child = os.fork()
    if child == 0:
        roots.unpack("oci", place / "image.tar")
    os.waitpid(child, 0)
    (left,) = [path for path in store.images_folder().iterdir() if path.name != "logs"]
    os.utime(left, (0, 0))
    store.make_ready()
    assert not left.exists()
