"""``lehr serve``."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import socket

    from lehr.app.serve.work import Limits
    from lehr.engine.native.settings import NativeConfig

_TOKEN = re.compile(r"[\x21-\x7e]+")
_LOCAL = ("http://127.", "http://[::1]")


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one."
)
@click.option("--token", envvar="LEHR_TOKEN", help="What clients must show; also LEHR_TOKEN. Else made up.")
@click.option("--name", help="The id that clients name; otherwise the last part of MODEL.")
@click.option(
    "--max-running", default=64, show_default=True, type=click.IntRange(1), help="Completions at once."
)
@click.option(
    "--max-waiting",
    default=256,
    show_default=True,
    type=click.IntRange(0),
    help="Completions in line; more get 429.",
)
@click.option(
    "--cache-tokens", default=32768, show_default=True, type=click.IntRange(16, (1 << 31) - 1),
    help="Tokens that the cache of keys and values holds.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True),
    help="Seconds that a request may take.",
)  # fmt: skip
@click.option(
    "--drain", "drain_s", default=30.0, show_default=True, type=click.FloatRange(0),
    help="Seconds that running requests get when the server is stopped.",
)  # fmt: skip
@click.option(
    "--fast", "is_fast", is_flag=True,
    help="Weights, keys and values of one byte, and drafts: about twice as fast for few requests at once, and"
    " a little less precise. How far it agrees with the standard variant is measured and told at the start.",
)  # fmt: skip
@click.option(
    "--adapter", "adapters", metavar="NAME=FOLDER", multiple=True,
    help="A LoRA adapter in PEFT's format, served as the model NAME; may be given several times.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON: model, address, token.")
def serve(
    model: str,
    host: str,
    port: int,
    token: str | None,
    name: str | None,
    max_running: int,
    max_waiting: int,
    cache_tokens: int,
    timeout_s: float,
    drain_s: float,
    is_fast: bool,
    adapters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Serve a model over HTTP to OpenAI's clients, until stopped.

    MODEL is a run folder, a Hugging Face folder, or a model's name. Stop it with Ctrl-C or SIGTERM.
    """
    from lehr.app.serve.listening import bind
    from lehr.app.serve.work import Limits
    from lehr.core.errors import ConfigError
    from lehr.engine.native.settings import NativeConfig, fast
    from lehr.pipeline.models import locate_model
    from lehr.pipeline.observer import Silent

    class Notes(Silent):
        def note(self, text: str) -> None:
            click.echo(text, err=True)

    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigError(
            "the token cannot be sent in a header", expected="visible ASCII characters, no spaces"
        )
    config = NativeConfig(max_running=max_running, cache_tokens=cache_tokens)
    name = name or Path(model).resolve().name
    folders = _adapters(adapters, name)
    bound = bind(host, port)
    with bound:
        folder = locate_model(model, Notes(), only_sampled=True)
        asyncio.run(
            _serve(
                folder,
                name,
                bound,
                token,
                Limits(max_running, max_waiting, timeout_s),
                fast(config) if is_fast else config,
                folders,
                drain_s=drain_s,
                as_json=as_json,
            )
        )


def _adapters(given: tuple[str, ...], model: str) -> dict[str, Path]:
    from lehr.core.errors import ConfigError

    folders: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--adapter {text!r} cannot be read", expected="NAME=FOLDER")
        if name == model or name in folders:
            raise ConfigError(f"two models would be called {name!r}", expected="a name of its own for each")
        folders[name] = Path(folder)
    return folders


async def _serve(
    folder: Path,
    name: str,
    bound: socket.socket,
    token: str | None,
    limits: Limits,
    config: NativeConfig,
    adapters: dict[str, Path],
    *,
    drain_s: float,
    as_json: bool,
) -> None:
    from lehr.app.serve.listening import address_of, listen
    from lehr.app.serve.metrics import Meter
    from lehr.app.serve.server import application
    from lehr.app.serve.work import Service, served
    from lehr.engine.native.settings import standard
    from lehr.engine.opening import open_any, require_engine

    click.echo(f"loading {name} …", err=True)
    require_engine(folder, config)
    agreement = None
    if config != standard(config):
        from lehr.app.serve.agreement import measure

        agreement = measure(folder, config)
        click.echo(f"fast: {agreement}", err=True)
    engine = open_any(folder, config, note=lambda _: None)  # it was said when the model was found
    try:
        for adapter, place in adapters.items():
            await engine.load_adapter(adapter, place)
        model = served(folder, name, config.cache_tokens, tuple(adapters))
        secret = token or secrets.token_urlsafe(24)
        service = Service(engine, model, limits, Meter())
        address = address_of(bound)

        def ready() -> None:
            if as_json:
                told: dict[str, object] = {"model": name, "address": address, "token": secret}
                told |= {"adapters": list(adapters)} if adapters else {}
                click.echo(json.dumps(told | ({"agreement": asdict(agreement)} if agreement else {})))
                return
            shown = "$LEHR_TOKEN" if token else secret
            click.echo(_greeting(name, address, shown, model.context_tokens))
            if adapters:
                click.echo(f"adapters, each a model of its own: {', '.join(adapters)}")

        if not address.startswith(_LOCAL):
            click.echo(
                "the traffic is not encrypted; put a proxy with TLS in front of other machines", err=True
            )
        await listen(
            application(service, secret), service, bound, drain_s=drain_s, ready=ready,
            say=lambda text: click.echo(text, err=True),
        )  # fmt: skip
    finally:
        await engine.close()


def _greeting(name: str, address: str, token: str, context_tokens: int) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    quoted = body.replace("'", "'\\''")
    known = 'os.environ["LEHR_TOKEN"]' if token.startswith("$") else json.dumps(token)
    needs = "import os\n         " if token.startswith("$") else ""
    first = "Where a shell does not know the token: export LEHR_TOKEN=…\n" if token.startswith("$") else ""
    return f"""serving {name} at {address}/v1  (context {context_tokens} tokens; token {token})

curl     curl {address}/v1/chat/completions -H "Authorization: Bearer {token}" \\
           -H 'Content-Type: application/json' -d '{quoted}'

python   {needs}from openai import OpenAI
         client = OpenAI(base_url="{address}/v1", api_key={known})
         client.chat.completions.create(model={name!r}, messages=[{{"role": "user", "content": "Hello"}}])

{first}Ctrl-C stops it."""
