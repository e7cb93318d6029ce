"""Caption images: python generate.py [IMAGE ...] [--prompt TEXT] [--model FOLDER_OR_HUB_ID]; see --help."""

import sys

from nanovlm.cli.main import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("caption"))
