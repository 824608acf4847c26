"""Sampling: the engine that decodes, and the loop that turns tasks into groups."""
