"""Evaluation commands, each a `python -m eval.NAME`; nothing else imports this package."""

from nanovlm.cli.main import limit_spinning

limit_spinning()  # as the programs do that are measured
