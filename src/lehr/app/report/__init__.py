"""What a run achieved, from its record: numbers (``summary``), then views of them (``table``, ``html``)."""
