"""The embedded engine: continuous batching over paged keys and values; compiled kernels between products."""
