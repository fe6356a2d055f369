"""Images that are declared in a file: what such a file says, how it is built, where the image is kept.

A declared image is trusted by who declares it: what it installs and runs is no code of a model. It is built
in a box of its own that has the host's network and may write one layer, nothing else of the host.
"""
