"""Write a Python function from one sentence; hidden unit tests decide."""
