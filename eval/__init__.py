"""Measures, each a `python -m eval.NAME`; nothing else imports from here."""
