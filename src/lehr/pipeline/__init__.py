"""Composes the parts into a run, checkpoints it and resumes it. The only package that knows them all."""
