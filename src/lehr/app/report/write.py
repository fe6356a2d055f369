"""Writes ``report.html`` and ``summary.json`` of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

from lehr.app.meter import duration
from lehr.app.report.causes import count_causes
from lehr.app.report.curves import budgets
from lehr.app.report.html import Page, Shown, render
from lehr.app.report.record import Record, read_record
from lehr.app.report.summary import Summary, summarise
from lehr.app.report.transcript import choose_samples, pieces_of
from lehr.model.base import Renderer
from lehr.pipeline.folder import replace_text
from lehr.pipeline.models import load_renderer, locate_model
from lehr.pipeline.observer import Silent


def write_report(run: Path) -> tuple[Summary, Path]:
    """Recompute everything from the record, write both files, and return the summary and the page's path."""
    record = read_record(run)
    summary = summarise(
        record.attempts,
        domains=record.recipe.domains,
        stages=record.labels,
        seconds=record.seconds,
        pairs=record.pairs,
        notes=record.notes,
    )
    replace_text(run / "summary.json", json.dumps(summary.as_json(), indent=2) + "\n")
    page = run / "report.html"
    replace_text(page, render(_page(record, summary, _renderer(record))))
    return summary, page


def _renderer(record: Record) -> Renderer:
    """Return what turns the run's tokens into text: from one of its checkpoints, else from its base model."""
    for stage in record.recipe.stages:
        path = record.folder.checkpoint(stage.name)
        if (path / "config.json").exists():
            return load_renderer(path)
    return load_renderer(locate_model(record.recipe.model, Silent()))


def _page(record: Record, summary: Summary, renderer: Renderer) -> Page:
    samples = choose_samples(record.attempts, domains=record.recipe.domains, first="base", last=record.last)
    shown = [
        Shown(
            sample,
            pieces_of(sample.before.judged.trace, renderer) if sample.before else [],
            pieces_of(sample.after.judged.trace, renderer),
        )
        for sample in samples
    ]
    causes = {
        domain: count_causes([a for a in record.attempts if a.domain == domain])
        for domain in record.recipe.domains
    }
    facts = {
        "model": record.recipe.model,
        "run": record.folder.path.name,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)),
        "took": duration(sum(record.seconds.values())),
        "recipe": record.recipe.digest(),
    }
    return Page(
        title="lehr: what this run taught",
        facts=facts,
        summary=summary,
        lines=record.lines,
        budgets=budgets(record.lines, record.seconds),
        causes=causes,
        samples=shown,
        groups=record.groups,
        recipe=record.recipe.model_dump(mode="json"),
    )
