"""`python -m funrl`: the command `funrl`."""

import sys

from funrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
