"""`python -m postgrad COMMAND ...` is `postgrad COMMAND ...`."""

import sys

from postgrad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
