"""Limits that settings and environments share. Imports nothing, so that --help stays fast."""

MAX_REWARD = 1e15  # the square of what is larger has no room in the float32 of group statistics
