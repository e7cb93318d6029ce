"""Train a model: python train.py --recipe scenes --out FOLDER; see --help."""

import sys

from nanovlm.cli.main import door

if __name__ == "__main__":
    sys.exit(door("train"))
