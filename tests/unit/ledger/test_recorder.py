from pathlib import Path

import pytest

from lehr.core.errors import StaleWriter
from lehr.core.protocols import Recorder
from lehr.ledger.reader import LedgerReader
from lehr.ledger.recorder import LedgerRecorder
from lehr.ledger.store import Ledger


def test_events_are_written_at_a_flush_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l.sqlite")
    recorder = LedgerRecorder(ledger, limit=3)
    assert isinstance(recorder, Recorder)
    for n in range(5):
        recorder.record("exec", n=n)
    reader = LedgerReader(ledger.path)
    assert reader.events() == ()
    assert recorder.flush() == 3
    assert recorder.flush() == 0
    assert [(e.kind, dict(e.fields)) for e in reader.events()] == [
        ("exec", {"n": 2}),
        ("exec", {"n": 3}),
        ("exec", {"n": 4}),
        ("recorder.dropped", {"count": 2}),
    ]
    recorder.record("late")
    Ledger.open(ledger.path).close()
    with pytest.raises(StaleWriter):
        recorder.flush()
    assert len(reader.events()) == 4
    ledger.close()
