"""Evaluation commands, each a `python -m eval.NAME`; nothing else imports this package."""
