"""What a person meets: the command line, the progress display, the report."""
