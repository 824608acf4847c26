"""The wire between the roles of async-rl: messages, codec, keys, streams. Imports neither torch nor vllm."""

ASYNC_RL_PROTOCOL = True
"""Checked by `async_rl`: another package on PyPI is called `protocol` too."""
