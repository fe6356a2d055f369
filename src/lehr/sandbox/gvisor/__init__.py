"""Boxes on gVisor (``runsc``): a kernel of their own in user space between programs and this machine's.

``bundle`` is the image as an OCI bundle, ``runsc`` drives the binary, ``sandbox`` is one container's processes,
``stream`` carries frames over its two pipes, ``box`` is the box and its recorded state, ``backend`` makes boxes.
What runs inside is ``inside/relay.py``, the same runner as bubblewrap's except for how bytes travel.
"""
