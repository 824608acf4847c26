"""Where a process runs, for its lease: whoever wants to stop it, or look at it, finds it there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def whereabouts() -> Mapping[str, str]:
    """`host` and `pid` of this process."""
    return {"host": socket.gethostname(), "pid": str(os.getpid())}
