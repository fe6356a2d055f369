"""The embedded engine: continuous batching over a paged key-value cache, in plain torch."""
