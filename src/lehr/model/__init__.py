"""The model: one decoder that sampler and trainer share, checkpoints in and out, chat rendering."""
