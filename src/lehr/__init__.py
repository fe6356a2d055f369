"""lehr post-trains language models on tasks whose results can be checked.

Importing this package is cheap: it loads neither torch nor any other heavy library. Each
subpackage is imported by name, for example ``from lehr.sandbox.pool import Pool``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
