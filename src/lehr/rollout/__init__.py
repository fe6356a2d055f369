"""Rollouts: the agent loop, the dispatcher that keeps groups in flight, and the buffer of finished groups."""
