"""The CPU kernels, in C: see README.md beside this file."""
