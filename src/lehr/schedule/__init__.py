"""Which domain comes next. Pure logic on a clock: no I/O, no torch, no asyncio."""
