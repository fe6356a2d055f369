"""``lehr train``."""

from __future__ import annotations

from pathlib import Path

import click

from lehr.app.session import Session


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Folder of the run; runs/… by default.")
@click.option("--check", is_flag=True, help="Only check the recipe, and print what it resolves to.")
@click.pass_obj
def train(session: Session, recipe: Path, overrides: tuple[str, ...], folder: Path | None, check: bool) -> None:
    """Run the stages of a recipe.

    RECIPE is a TOML file, or the name of one that comes with lehr: quickstart, control, tiny. Values are
    overridden by KEY=VALUE, for example `seed=7`, `stages.0.train.learning_rate=1e-5` or
    `'domains=["code/functions"]'`.
    """
    from lehr.app.launch import launch, new_folder
    from lehr.app.preflight import require_fit_host
    from lehr.app.tables import print_json
    from lehr.pipeline.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)
    if check:
        from lehr.pipeline.run import check_recipe

        check_recipe(resolved, lambda text: click.echo(f"note: {text}", err=True))
        print_json({"digest": resolved.digest(), "recipe": resolved.model_dump(mode="json")})
        return
    require_fit_host()
    from lehr.pipeline.run import start_run

    path = folder or new_folder(recipe.stem)
    click.echo(f"{resolved.model} on {', '.join(resolved.domains)}, in {path}")
    launch(session, path, lambda observer: start_run(resolved, path, observer))
