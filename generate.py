"""Caption pictures: python generate.py [PICTURE ...] [--prompt TEXT] [--model FOLDER_OR_HUB_ID]; see --help."""

import sys

from nanovlm.cli.main import door

if __name__ == "__main__":
    sys.exit(door("caption"))
