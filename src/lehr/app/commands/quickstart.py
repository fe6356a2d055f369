"""``lehr quickstart``."""

from __future__ import annotations

from pathlib import Path

import click

from lehr.app.session import Session


@click.command()
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    help="smollm2-135m, tiny (a random one, for a walk through in two minutes), or a Hugging Face folder.",
)
@click.option("--control", is_flag=True, help="Also spend the compute of RL on more SFT, to compare with.")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Folder of the run; runs/… by default.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, (1 << 63) - 1),
    help="Seed of everything that is drawn.",
)
@click.pass_obj
def quickstart(session: Session, model: str, control: bool, folder: Path | None, seed: int) -> None:
    """The whole loop on a real small model, then a report.

    Measures a pretrained model on held-out tasks, teaches it from a few demonstrations, then by
    reinforcement learning from verified rewards, and measures it again. About 16 minutes on two cores.
    """
    from lehr.app.launch import launch, new_folder
    from lehr.app.preflight import require_fit_host
    from lehr.pipeline.recipe import quickstart_recipe

    require_fit_host()
    from lehr.pipeline.run import start_run

    recipe = quickstart_recipe(model, control=control, seed=seed)
    path = folder or new_folder("quickstart")
    click.echo(f"{recipe.model} on {', '.join(recipe.domains)}, in {path}")
    launch(session, path, lambda observer: start_run(recipe, path, observer))
