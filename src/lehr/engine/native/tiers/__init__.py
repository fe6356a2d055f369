"""Slower places for keys and values that the block pool has no room for: compressed memory, then disk.

``codec`` makes a segment smaller and proves that it is whole, ``folder`` keeps files, ``store`` knows what is
where, ``rates`` measures whether a tier is worth it, ``prefetch`` moves blocks between the pool and the tiers.
"""
