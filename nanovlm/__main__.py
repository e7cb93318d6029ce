"""`python -m nanovlm` is the console script `nanovlm`."""

import sys

from nanovlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
