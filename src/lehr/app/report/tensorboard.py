"""Metrics for those who look at them in TensorBoard. Needs the extra ``tensorboard``; nothing else does."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from lehr.app.report.curves import read_metrics
from lehr.core.errors import MissingDependency
from lehr.pipeline.folder import RunFolder


def export(run: Path) -> Path:
    """Write every metric of a run as a scalar below ``RUN/tensorboard`` and return that folder.

    What stood there is replaced. Raises ``MissingDependency`` without the package.
    """
    try:
        writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        protos: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    except ImportError as error:
        raise MissingDependency(
            "tensorboard is not installed", hint="Install it: `pip install 'lehr[tensorboard]'`"
        ) from error
    folder, _ = RunFolder.open(run)
    into = run / "tensorboard"
    shutil.rmtree(into, ignore_errors=True)
    writer = writers.EventFileWriter(str(into))
    for line in read_metrics(folder.metrics):
        values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
        summary = summaries.Summary(value=values)
        writer.add_event(protos.Event(wall_time=line.at, step=line.step, summary=summary))
    writer.close()
    return into
