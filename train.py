"""Train a model: python train.py --recipe scenes --out FOLDER; see --help."""

import sys

from nanovlm.cli.main import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("train"))
