"""The stages of a run, one file each. A stage takes the trainer from one checkpoint to the next."""
