"""The review of captions: a page on this machine to look at them beside their pictures, and to change them.

Needs the extra `serve`.
"""
