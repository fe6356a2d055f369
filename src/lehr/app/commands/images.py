"""``lehr images``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from lehr.app.tables import json_option

if TYPE_CHECKING:
    from lehr.sandbox.images.store import Built


@click.group()
def images() -> None:
    """Build, list and remove the images of boxes."""


@images.command()
@click.argument("name")
@json_option
def build(name: str, as_json: bool) -> None:
    """Build the image NAME, as NAME:VARIANT or FILE.toml:VARIANT, unless that was done; say where it lies.

    For example: lehr images build build-env:base
    """
    from lehr.app.tables import print_json
    from lehr.core.errors import ConfigError
    from lehr.sandbox import roots
    from lehr.sandbox.images import declaration, store

    if not declaration.is_declared(name):
        raise ConfigError(
            f"{name} is not declared in a file, so there is nothing to build",
            expected="NAME:VARIANT, or a file such as ./build-env.toml:base",
        )
    declared = declaration.read(name)
    ground = roots.make(name, lambda text: click.echo(text, err=True))
    roots.find(name)  # whether boxes can use it
    built = store.find(ground.digest)
    if built is None:
        raise ConfigError(f"{name} was removed while it was built", hint=f"lehr images build {name}")
    if as_json:
        print_json(_row(built, declared.name, "built"))
        return
    if declared.layer.loose:
        click.echo(f"not pinned to a version: {', '.join(declared.layer.loose)}", err=True)
    click.echo(
        f"{declared.name} is {built.digest[:12]}, {built.own_bytes / (1 << 20):.1f} MiB over {built.base}, "
        f"built in {built.seconds:.1f} s ({built.how})"
    )
    click.echo(f"use it  lehr sandbox run --image {name} -- COMMAND")


@images.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show every image that is declared or kept: built, changed since it was built, or not built."""
    from lehr.app.tables import show

    columns = ("name", "state", "digest", "base", "MiB", "made")
    show(_rows(), as_json=as_json, columns=columns, empty="no image is declared or kept")


@images.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove what was built of the image NAME, or of the digest NAME; boxes must not be using it.

    Images that stand on it stay whole, and its declaration is kept.
    """
    from lehr.core.errors import UnknownName
    from lehr.sandbox.images import declaration, store

    key = ""
    if declaration.is_declared(name) and declaration.locate(name):
        key = declaration.read(name).key
    found = [
        (folder, built)
        for folder, built in store.kept()
        if (built and (built.key == key if key else built.name == name))
        or (len(name) >= 6 and folder.name.startswith(name))
    ]
    if not found:
        known = {built.name if built else folder.name[:12] for folder, built in store.kept()}
        raise UnknownName.among("built image", name, known, hint="`lehr images list` shows all of them.")
    for folder, built in found:
        store.remove(folder)
        click.echo(f"removed {built.name if built else 'the archive'} {folder.name[:12]}")


def _rows() -> list[dict[str, Any]]:
    from lehr.core.errors import LehrError
    from lehr.sandbox import roots
    from lehr.sandbox.images import declaration, store

    rows: list[dict[str, Any]] = []
    shown: set[str] = set()
    keys: set[str] = set()
    for name in declaration.names():
        row: dict[str, Any] = {"name": name}
        try:
            declared = declaration.read(name)
            keys.add(declared.key)
            row |= {"base": declared.layer.base, "file": declared.key}
            digest = roots.digest_of(declared)
        except LehrError as error:
            rows.append({**row, "state": f"unusable: {error.what}"})
            continue
        shown.add(digest)
        built = store.find(digest)
        rows.append(_row(built, name, "built") if built else {**row, "state": "not built"})
    for folder, built in store.kept():
        if folder.name in shown:
            continue
        if built:
            rows.append(_row(built, built.name, "changed since" if built.key in keys else "not declared here"))
        else:
            rows.append({"name": "an archive", "state": "unpacked", "digest": folder.name, "base": None})
    return rows


def _row(built: Built, name: str, state: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "digest": built.digest,
        "base": built.base,
        "MiB": round(built.own_bytes / (1 << 20), 1),
        "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(built.made_at)),
        "seconds": built.seconds,
        "how": built.how,
        "folder": str(built.root),
        "file": built.key,
        "log": str(built.log),
    }
