"""Domains bridged from the package ``reasoning-gym``, behind our own strict comparison."""
