"""Processes that a test must have ended."""

from __future__ import annotations

import psutil


def children() -> list[psutil.Process]:
    """What this process started and is still there, and what that started. Without the helpers of `multiprocessing`, which live
    as long as this process."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any("from multiprocessing." in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
