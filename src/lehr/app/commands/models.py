"""``lehr models``."""

from __future__ import annotations

import click

from lehr.app.tables import json_option


@click.group()
def models() -> None:
    """Fetch and convert models."""


@models.command()
@click.argument("name")
def fetch(name: str) -> None:
    """Bring a model to this machine, converted to a Hugging Face folder and cached."""
    from lehr.model.fetch import fetch as fetch_model

    click.echo(fetch_model(name, lambda text: click.echo(text, err=True)))


@models.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show the models that are known by name, and whether they are here."""
    from lehr.app.tables import show
    from lehr.core.errors import ConfigError
    from lehr.model.fetch import MODELS, locate

    def where(name: str) -> str | None:
        try:
            return str(locate(name))
        except ConfigError:
            return None

    rows = [
        {"name": name, "package": wheel.package, "version": wheel.version, "licence": wheel.licence}
        | {"folder": where(name)}
        for name, wheel in MODELS.items()
    ]
    show(rows, as_json=as_json)
