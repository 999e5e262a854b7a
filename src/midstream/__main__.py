"""`python -m midstream` is the command line."""

import sys

from midstream.runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
