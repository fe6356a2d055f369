"""Boxes that are containers of a Docker Engine, or of what speaks its API.

``profile`` is our system call filter in the engine's form, ``payload`` what a container is asked to be,
``attached`` its multiplexed streams, ``driver`` the calls, ``backend`` puts them together.
"""
