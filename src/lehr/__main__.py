"""``python -m lehr``."""

from lehr.app.cli import main

if __name__ == "__main__":
    main()
