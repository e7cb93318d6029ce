"""Code that several evaluation commands share."""
