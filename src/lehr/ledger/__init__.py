"""The record of a run: who drew what, how it was judged, at which step it was trained. SQLite by default."""
