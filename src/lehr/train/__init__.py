"""Training: losses, advantages, packing, the trainer and its role. Speaks in ``core`` types only."""
