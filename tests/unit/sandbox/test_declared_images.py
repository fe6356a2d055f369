"""Images that a file declares: what it may say, what is built from it, and that it is built once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from lehr.app.cli import run as lehr
from lehr.core.errors import ConfigError, HostUnfit
from lehr.sandbox import roots
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.images import build, declaration, digests, merge, store, workshop
from lehr.sandbox.images.halt import Halted
from lehr.sandbox.images.workshop import BuildFailed

USER = 12_345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other host: needs root")


@pytest.fixture
def home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of images, and a working folder beside it with a place for declarations."""
    (place / "here" / "images").mkdir(parents=True)
    monkeypatch.setenv("LEHR_HOME", str(place / "home"))
    monkeypatch.chdir(place / "here")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return place / "here"


def declare(home: Path, text: str, name: str = "env") -> Path:
    file = home / "images" / f"{name}.toml"
    file.write_text(text)
    return file


def wheel(folder: Path, version: str = "1.0") -> str:
    """A wheel with one module and one program."""
    name = f"small_thing-{version}-py3-none-any.whl"
    facts = f"small_thing-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as file:
        file.writestr("small_thing.py", f"VERSION = {version!r}\ndef main(): print('thing', VERSION)\n")
        file.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: small-thing\nVersion: {version}\n")
        file.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{facts}/entry_points.txt", "[console_scripts]\nthing = small_thing:main\n")
        file.writestr(f"{facts}/RECORD", "")
    return name


def in_boxes(name: str, *commands: list[str]) -> list[str]:
    async def run() -> list[str]:
        backend = BwrapBackend()
        try:
            box = await backend.create(Spec(image=name, limits=Limits(wall_s=20.0)))
            results = [await box.exec(command) for command in commands]
            async with box.shell() as shell:
                results.append(await shell.run("echo in a shell: $GREETING"))
            await box.destroy()
            return [(result.stdout + result.stderr).decode() for result in results]
        finally:
            await backend.close()

    return asyncio.run(run())


# --- on the host's system folders


def test_an_image_on_the_host_has_packages_files_variables_and_what_was_run(home: Path) -> None:
    (home / "images" / "data").mkdir()
    (home / "images" / "data" / "words.txt").write_text("one two\n")
    (home / "images" / "tool").write_text("#!/bin/sh\necho tool\n")
    os.chmod(home / "images" / "tool", 0o700)
    declare(
        home,
        f"""
        [base]
        pip = ["{wheel(home / "images")}"]
        files = {{ "opt/data" = "data", "/opt/bin/tool" = "tool" }}
        env = {{ GREETING = "hello" }}
        run = ["python3 -c 'import small_thing' && echo $GREETING > /opt/ran"]
        """,
    )
    said = in_boxes(
        "env:base",
        ["python3", "-c", "import small_thing; print(small_thing.VERSION)"],
        ["thing"],
        ["sh", "-c", "cat /opt/data/words.txt /opt/ran; /opt/bin/tool; touch /opt/x"],
        ["python3", "-I", "-c", "import small_thing"],
    )
    assert said[0] == "1.0\n" and said[1] == "thing 1.0\n"
    assert said[2].startswith("one two\nhello\ntool\n") and "Read-only" in said[2]
    assert "No module named" in said[3], "an isolated interpreter sees no variable"
    assert said[4] == "in a shell: hello\n"


def test_a_variant_on_another_adds_changes_and_removes(home: Path) -> None:
    declare(
        home,
        f"""
        [plain]
        env = {{ GREETING = "hello" }}
        [base]
        pip = ["{wheel(home / "images")}"]
        run = ["mkdir /opt/a; echo 1 > /opt/a/kept; echo 1 > /opt/a/changed; echo 1 > /opt/gone; mkdir /opt/b"]
        [full]
        base = "env:base"
        run = ["echo 2 >> /opt/a/changed; rm /opt/gone; rm -r /opt/b; mkdir /opt/b; echo 2 > /opt/b/new"]
        """,
    )
    listing = ["sh", "-c", "cd /opt; find a b gone -type f 2>/dev/null | sort | xargs tail"]
    full, thing, *_ = in_boxes("env:full", listing, ["thing"])
    assert thing == "thing 1.0\n"
    assert full == "==> a/changed <==\n1\n2\n\n==> a/kept <==\n1\n\n==> b/new <==\n2\n"
    base, *_ = in_boxes("env", listing)
    told, *_ = in_boxes("env:plain", ["python3", "-c", "import os; print(os.environ['GREETING'])"])
    assert told == "hello\n"
    assert "gone" in base and "b/new" not in base and base.count("2") == 0, "the base is as it was"


# --- on a system of its own


@pytest.mark.parametrize("layered", [pytest.param(True, marks=needs_root), False])
def test_an_image_on_a_root_folder_leaves_it_alone(
    home: Path, root: Path, layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not layered:
        monkeypatch.setattr(workshop.Workshop, "_mounting", lambda _: [])
    declare(
        home,
        f"""
        [base]
        base = "{root}"
        pip = {[wheel(home / "images")] if layered else []}
        files = {{ "etc/own/deep.conf" = "env.toml" }}
        run = ["echo more >> /opt/data; rm /etc/os-release; rm -r /opt/secret", "mkdir /opt/secret"]
        [full]
        base = "env:base"
        run = ["cat /opt/data > /opt/copy; mv /opt/copy /opt/moved; rm /opt/data"]
        """,
    )
    before = digests.of_root(root)
    made = roots.make("env:base")
    assert made.root and digests.of_root(root) == before
    assert json.loads((made.root.parent / "image.json").read_text())["how"] == (
        "overlay" if layered else "copy"
    )
    linked = os.stat(made.root / "usr/bin/cat").st_ino == os.stat(root / "usr/bin/cat").st_ino
    assert linked == layered, "what the layer left alone costs no disk"
    looked = in_boxes(
        "env:full",
        ["python3", "-c", "import small_thing; print(small_thing.VERSION)" if layered else "print('1.0')"],
        ["sh", "-c", "cat /opt/moved; ls /opt; ls /opt/secret; cat /etc/own/deep.conf"],
    )
    assert looked[0] == "1.0\n"
    assert looked[1].startswith("of the image\nmore\nmoved\nsecret\n\n        [base]")
    assert (root / "opt/data").read_text() == "of the image\n"
    shutil.rmtree(made.root.parent)
    assert in_boxes("env:full", ["cat", "/opt/moved"])[0] == "of the image\nmore\n", "whole without its base"


@needs_root
def test_an_ordinary_user_builds_in_a_namespace_of_its_own(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel refuses that user the mount, it is a copy."""
    own = home.parent / "own"
    own.mkdir()
    shutil.copytree(root, own / "root", symlinks=True)
    for path in (own, *own.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    monkeypatch.setenv("LEHR_HOME", str(own))
    declare(
        home,
        f'''
        [base]
        base = "{own / "root"}"
        run = ["python3 -c 'import os; print(os.getuid())' > /who; rm -r /opt/secret; mkdir /opt/secret"]
        ''',
    )
    declared = declaration.read("env")
    (own / "said").touch()
    os.chown(own / "said", USER, USER)
    child = os.fork()
    if child == 0:  # this interpreter is loaded; that user may not be able to load another one
        try:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            ground = build.Ground(digests.of_root(own / "root"), own / "root", host=False)
            built = build.build(declared, ground)
            (own / "said").write_text(str(built.root))
        except BaseException as error:
            (own / "said").write_text(f"failed: {error}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    made = Path((own / "said").read_text())
    assert made.is_dir(), made
    assert (made / "who").read_text() == "0\n" and (made / "who").stat().st_uid == USER
    assert not list((made / "opt/secret").iterdir()) and (made / "usr/bin/cat").is_file()
    assert json.loads((made.parent / "image.json").read_text())["how"] in ("overlay", "copy")
    assert not list(store.images_folder().glob("building-*"))


def test_marks_of_what_was_removed_are_followed(place: Path) -> None:
    base, layer = place / "base", place / "layer"
    for path in ("base/d/gone", "base/d/kept", "base/hidden/old", "layer/d/new", "layer/hidden/new"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(path)
    (base / "link").symlink_to("d/kept")
    try:
        os.mknod(layer / "d/gone", 0o020000, 0)
        os.setxattr(layer / "hidden", "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"other host: {error}")
    (layer / "d").chmod(0o711)
    merge.merge(base, layer, place / "both")
    found = sorted(str(p.relative_to(place / "both")) for p in (place / "both").rglob("*") if not p.is_dir())
    assert found == ["d/kept", "d/new", "hidden/new", "link"]
    assert (place / "both/d").stat().st_mode & 0o777 == 0o711
    assert os.readlink(place / "both/link") == "d/kept"


# --- names


def test_a_name_is_looked_up_beside_the_file_then_here_then_at_home(home: Path, place: Path) -> None:
    beside, usual = place / "tasks", store.home_folder() / "images.d"
    for folder in (beside / "images", usual):
        folder.mkdir(parents=True)
        (folder / "env.toml").write_text("[base]\n")
    (usual / "other.toml").write_text("[only]\n")
    here = declare(home, "[base]\n[full]\n")
    assert declaration.read("env", beside).file == beside / "images" / "env.toml"
    assert declaration.read("env:full").key == f"{here}:full"
    assert declaration.read("other").key == f"{usual / 'other.toml'}:only"
    assert declaration.read("./images/env.toml:full").key == f"{here}:full"
    assert declaration.absolute("env:base", beside) == f"{beside}/images/env.toml:base"
    assert declaration.absolute("nowhere:base", beside) == "nowhere:base"
    assert declaration.absolute("oci:a.tar", beside) == f"oci:{beside}/a.tar"
    assert (
        declaration.absolute("./root", beside) == f"{beside}/root"
        and declaration.absolute("host", beside) == "host"
    )
    assert list(declaration.names()) == ["env:base", "env:full", "other:only"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[base", "valid TOML"),
        ("apt = ['gcc']", "'apt' is no table"),
        ("[base]\napts = ['gcc']", "did you mean 'apt'"),
        ("[base]\napt = ['gcc; rm -rf /']", "is no Debian package"),
        ("[base]\napt = ['gcc']", "a base with a system of its own"),
        ("[base]\npip = ['--index-url=x']", "is no requirement"),
        ("[base]\npip = ['-r reqs.whl']", "is no requirement"),
        (
            "[base]\npip = ['not-there-1.0-py3-none-any.whl']",
            "names 'not-there-1.0-py3-none-any.whl', which is not",
        ),
        ("[base]\nfiles = { 'opt/x' = 'nothing' }", "names 'nothing', which is not there"),
        ("[base]\nfiles = { 'opt/../etc/x' = 'env.toml' }", "is no place in an image"),
        ("[base]\nfiles = { 'proc/x' = 'env.toml' }", "a box makes /proc itself"),
        ("[base]\nfiles = { 'etc/x' = 'env.toml' }", "a place below opt/"),
        ("[base]\nenv = { 'A B' = 'x' }", "is no name of a variable"),
        ("[base]\nfiles = { 'opt/x' = 'env.toml', '/opt/x' = 'env.toml' }", "the same place"),
        ('[base]\nrun = ["echo \\u0000"]', "holds a NUL character"),
        ("[base]\nbase = 'env:base'", "images stand on each other"),
        ("[base]\nbase = 'env:full'\n[full]\nbase = 'env'", "images stand on each other"),
        ("[base]\nbase = 'elsewhere'", "there is no image 'elsewhere'"),
        ("[base]\nbase = '/does/not/exist'", "is no folder"),
        ("[one]\n[two]\n", "one of one, two"),
        ("[base]\n[setup.x]\nrun = ['true']\nnetwork = true", "a set-up step has no network"),
        ("[base]\n[setup]\nx = 'true'", "'setup.x' is no table"),
    ],
)
def test_a_mistake_in_a_declaration_is_named(home: Path, text: str, words: str) -> None:
    declare(home, text)
    with pytest.raises((ConfigError, HostUnfit), match=words):
        roots.find("env:base")
    assert not list(store.images_folder().glob("building-*"))


@pytest.mark.parametrize(
    "entry", ["pytest==8.3.4", "a[b,c]>=1,<2", "x ; python_version > '3.9'", "w/a-1.tar.gz"]
)
def test_requirements_that_are_read(entry: str) -> None:
    assert declaration.Layer(pip=(entry,)).pip == (entry,)


def test_the_declaration_of_the_documentation_is_read(home: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()
    declare(home, text.split("```toml\n")[1].split("```")[0], "build-env")
    full = declaration.read("build-env:full")
    assert list(full.steps) == ["restore_dependency_cache", "compile_project"]
    assert full.layer.base == f"{home.resolve()}/images/build-env.toml:base"
    assert declaration.read("build-env").layer.loose == ["python3", "libc6-dev", "make"]
    assert declaration.read("build-env:light").layer.base == "host"


def test_what_is_not_pinned_is_named() -> None:
    layer = declaration.Layer(apt=("gcc", "make=4.3-4"), pip=("a>=1", "b==2", "c-1.whl"))
    assert layer.loose == ["gcc", "a>=1"]


# --- building


def test_a_step_that_fails_is_named_with_its_last_lines_and_the_log(home: Path) -> None:
    file = declare(home, '[base]\nrun = ["true", "echo one; echo two >&2; exit 7"]')
    with pytest.raises(BuildFailed) as caught:
        roots.find("env")
    said = str(caught.value)
    assert "run 2: echo one" in said and "exit code 7" in said and "one | two" in said
    (log,) = (store.images_folder() / "logs").iterdir()
    assert str(log) in said and "== run 2" in log.read_text()
    assert [path.name for path in store.images_folder().iterdir()] == ["logs"]
    file.write_text('[base]\nrun = ["echo begun; sleep 60"]\ntimeout = 0.3\n')
    begun = time.monotonic()
    with pytest.raises(BuildFailed, match=r"took more than 0\.3 s; it last said: begun"):
        roots.find("env")
    assert time.monotonic() - begun < 5


def test_it_is_built_once_and_again_when_anything_changes(home: Path) -> None:
    (home / "images" / "data").write_text("one")
    text = '[base]\nfiles = { "opt/data" = "data" }\n'
    file = declare(home, text)
    said: list[str] = []
    first = roots.make("env", said.append).digest
    assert said and roots.make(f"{file}:base", said.append).digest == first
    assert len(said) == 2, "the second time, nothing was done"
    changes = [text + 'env = { A = "1" }\n', text + 'run = ["true"]\n', text]
    digests_seen = {first}
    for number, change in enumerate(changes):
        file.write_text(change)
        (home / "images" / "data").write_text("one" if number < 2 else "two")
        digests_seen.add(roots.digest_of(declaration.read("env")))
    assert len(digests_seen) == 4
    file.write_text(text + "timeout = 7\n[setup.x]\nrun = ['true']\n")
    (home / "images" / "data").write_text("one")
    assert roots.digest_of(declaration.read("env")) == first, "not by what does not change the image"


def test_files_in_another_order_are_another_image(home: Path) -> None:
    (home / "images" / "data").mkdir()
    (home / "images" / "data" / "x").write_text("of the folder")
    (home / "images" / "other").write_text("of its own")
    entries = ['"opt/data" = "data"', '"opt/data/x" = "other"']
    seen: set[str] = set()
    for order in (entries, entries[::-1]):
        declare(home, f"[base]\nfiles = {{ {', '.join(order)} }}\n")
        ground = roots.make("env")
        assert ground.root
        seen.add((ground.root / "opt/data/x").read_text())
    assert seen == {"of the folder", "of its own"}


def test_archives_of_one_name_are_each_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (home / "images" / name).mkdir()
        (home / "images" / name / "main.zip").write_text(name)
    declare(home, '[base]\npip = ["a/main.zip", "b/main.zip"]')
    given: list[str] = []

    def do(_: object, step: str, argv: list[str], *, binds: dict[str, Path], **__: object) -> None:
        given.extend(binds[word.removeprefix("/run/lehr/")].read_text() for word in argv[-2:])

    monkeypatch.setattr(workshop.Workshop, "do", do)
    roots.make("env")
    assert given == ["a", "b"]


def test_builders_at_once_build_once(home: Path) -> None:
    declare(home, '[base]\nrun = ["sleep 0.3; echo $$ > /opt/made"]')
    said: list[str] = []
    threads = [threading.Thread(target=roots.make, args=("env", said.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        said.count("building env:base") == 1
        and said.count("another process builds env:base; waiting for it") == 2
    )
    (kept,) = store.kept()
    assert kept[1] and kept[1].name == "env:base"


def test_a_killed_build_is_taken_for_no_image_and_is_swept(home: Path) -> None:
    declare(home, '[base]\nrun = ["echo half > /opt/half; sleep 60"]')
    code = "from lehr.sandbox import roots; roots.make('env')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    builder = subprocess.Popen([sys.executable, "-c", code], env=env)
    until = time.monotonic() + 20
    while not list(store.images_folder().glob("building-*/merged/opt/half")):
        assert time.monotonic() < until
        time.sleep(0.02)
    (left,) = store.images_folder().glob("building-*")
    store.make_ready()
    os.utime(left, (0, 0))
    store.make_ready()
    assert left.is_dir(), "its builder lives"
    builder.kill()
    builder.wait(10)
    assert not store.kept()
    until = time.monotonic() + 5
    while left.is_dir():
        os.utime(left, (0, 0))
        store.make_ready()
        assert time.monotonic() < until
    declare(home, '[base]\nrun = ["true"]')
    assert roots.make("env").digest


def test_a_box_that_waits_for_a_build_holds_no_other_up_and_a_cancelled_wait_no_build(home: Path) -> None:
    declare(home, '[base]\nrun = ["sleep 1; echo made > /opt/made"]')

    async def run() -> None:
        backend = BwrapBackend()
        spec = Spec(image="env")
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await backend.create(spec)
            box = await backend.create(Spec())
            assert not store.kept()
            await box.destroy()
            own = await backend.create(spec)
            assert (await own.exec(["cat", "/opt/made"])).stdout == b"made\n"
            await own.destroy()
        finally:
            await backend.close()

    asyncio.run(run())
    assert len(store.kept()) == 1


def begun_build(home: Path) -> str:
    """Declare an image with a step that sleeps; return what marks its processes."""
    mark = f"30.{os.getpid()}{time.monotonic_ns()}"
    declare(home, f'[base]\nrun = ["echo half > /opt/half; sleep {mark} & sleep {mark}"]')
    return mark


def marked(mark: str) -> list[str]:
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in (said := place.read_bytes()):
                found.append(said.decode(errors="replace"))
    return found


def wait_for_step(mark: str) -> None:
    until = time.monotonic() + 20
    while not (list(store.images_folder().glob("building-*/merged/opt/half")) and marked(f"sleep\0{mark}")):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("closes", [True, False])
def test_ctrl_c_ends_a_build_that_a_box_waits_for(home: Path, closes: bool) -> None:
    mark = begun_build(home)

    async def run() -> None:
        backend = BwrapBackend()
        making = asyncio.create_task(backend.create(Spec(image="env")))
        await asyncio.to_thread(wait_for_step, mark)
        making.cancel()
        if closes:
            await backend.close()

    begun = time.monotonic()
    asyncio.run(run())  # a loop that ends waits for its threads
    assert time.monotonic() - begun < 10
    assert marked(mark) == []
    assert [path.name for path in store.images_folder().iterdir()] == ["logs"]


def test_who_waits_for_a_build_that_is_ended_is_told(home: Path) -> None:
    mark = begun_build(home)

    async def run() -> None:
        backend = BwrapBackend()
        making = asyncio.create_task(backend.create(Spec(image="env")))
        await asyncio.to_thread(wait_for_step, mark)
        await backend.close()
        with pytest.raises(SandboxError, match="search for the image env was stopped"):
            await making
        with pytest.raises(SandboxError, match="the backend is closed"):
            await backend.create(Spec(image="env"))

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_that_builds(home: Path, number: signal.Signals) -> None:
    mark = begun_build(home)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    builder = subprocess.Popen([sys.executable, "-m", "lehr", "images", "build", "env:base"], env=env)
    wait_for_step(mark)
    builder.send_signal(number)
    assert builder.wait(5) == 128 + number
    assert marked(mark) == []
    assert [path.name for path in store.images_folder().iterdir()] == ["logs"]


def test_a_wait_for_another_builder_ends_at_once(home: Path) -> None:
    mark = begun_build(home)
    first, second = threading.Event(), threading.Event()
    said: list[str] = []
    caught: list[str] = []

    def build_it(halt: threading.Event) -> None:
        try:
            roots.make("env", said.append, halt)
        except Halted as error:
            caught.append(str(error))

    threads = [threading.Thread(target=build_it, args=(halt,)) for halt in (first, second)]
    threads[0].start()
    wait_for_step(mark)
    threads[1].start()
    while not any("another process" in line for line in said):
        time.sleep(0.01)
    for halt, thread, words in ((second, threads[1], "the wait for"), (first, threads[0], "the build of")):
        halt.set()
        thread.join(5)
        assert not thread.is_alive() and caught.pop().startswith(words)
    assert marked(mark) == []


@needs_root
def test_apt_needs_root(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(home, f'[base]\nbase = "{root}"\napt = ["hello"]')
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostUnfit, match="apt needs root"):
        roots.make("env")


@pytest.mark.skipif(
    not os.environ.get("LEHR_TEST_ROOT"),
    reason="other host: needs root, the network, and a Debian root folder named by LEHR_TEST_ROOT",
)
def test_debian_packages_are_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    base = os.environ["LEHR_TEST_ROOT"]
    declare(home, f'[base]\nbase = "{base}"\napt = ["python3", "hello"]\npip = ["iniconfig==2.0.0"]')
    said = in_boxes("env", ["hello"], ["python3", "-c", "import iniconfig; print('there')"])
    assert said[0] == "Hello, world!\n" and said[1] == "there\n"


# --- the command line


def test_images_are_built_listed_and_removed_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = declare(home, '[base]\nrun = ["echo made > /opt/made"]\n[broken]\nbase = "/does/not/exist"\n')
    assert lehr(["images", "list", "--json"]) == 0
    states = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {"env:base": "not built", "env:broken": "unusable: the image /does/not/exist is no folder"}
    assert lehr(["images", "build", "env:base"]) == 0
    said = capsys.readouterr()
    assert "env:base is" in said.out and "run: echo made" in said.err
    assert lehr(["sandbox", "run", "--image", "env:base", "--", "cat", "/opt/made"]) == 0
    assert capsys.readouterr().out == "made\n"
    file.write_text('[base]\nrun = ["echo other > /opt/made"]\n')
    assert lehr(["sandbox", "run", "--image", "./images/env.toml", "--", "cat", "/opt/made"]) == 0
    assert capsys.readouterr().out == "other\n"
    assert lehr(["images", "list"]) == 0
    listed = capsys.readouterr().out
    assert "built" in listed and "changed since" in listed
    assert lehr(["images", "remove", "env:base"]) == 0
    assert capsys.readouterr().out.count("removed env:base") == 2 and not store.kept()
    assert lehr(["images", "remove", "env:base"]) == 2
    assert lehr(["images", "build", "host"]) == 2
    assert lehr(["images", "build", "emv:base"]) == 2
    assert "there is no image 'emv:base'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"digest": "../x"}', '{"env": [1]}', "rootfs"])
def test_a_damaged_image_is_none(home: Path, damage: str) -> None:
    declare(home, '[base]\nrun = ["true"]')
    digest = roots.make("env").digest
    folder = store.images_folder() / digest
    if damage == "rootfs":
        store.discard(folder / "rootfs")
    else:
        facts = json.loads((folder / "image.json").read_text())
        changed = json.loads(damage) if damage else None
        whole = {**facts, **changed} if isinstance(changed, dict) and changed else changed
        (folder / "image.json").write_text("" if whole is None else json.dumps(whole))
    assert store.find(digest) is None
    with pytest.raises(HostUnfit, match=f"Remove {folder}"):
        roots.make("env")


def test_the_place_of_an_image_that_something_else_takes_is_named(home: Path) -> None:
    declare(home, '[base]\nrun = ["true"]')
    taken = store.images_folder() / roots.digest_of(declaration.read("env")) / "something"
    taken.mkdir(parents=True)
    with pytest.raises(HostUnfit, match="cannot move a built image to"):
        roots.make("env")
    assert build.SITE.startswith("/opt/")
