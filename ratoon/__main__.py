"""`python -m ratoon`: the same as the `ratoon` command."""

import sys

from ratoon.cli import main

if __name__ == "__main__":
    sys.exit(main())
