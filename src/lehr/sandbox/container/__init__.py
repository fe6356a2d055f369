"""Boxes that are containers of an engine elsewhere: what the backends ``docker`` and ``kubernetes`` share.

``driver`` is what each of them implements, ``carrier`` joins an engine's stream to our frames, ``box`` is the
box and its container, ``backend`` makes boxes. What runs inside is ``inside/contained.py``.
"""
