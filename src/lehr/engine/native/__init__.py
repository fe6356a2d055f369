"""The embedded engine: continuous batching over a paged key-value cache, torch's products and compiled kernels."""
