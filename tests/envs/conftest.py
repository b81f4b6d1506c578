"""Fixtures of more than one test file."""

from judged import judge  # noqa: F401
