"""Read the asked fields of a short invoice or statement."""
