"""Waiting for a full server: what was sampled or scored is never thrown away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from protocol.errors import QueueFull
from protocol.streams import Publication, Streams

FULL_RETRY_S = 0.2


async def publish_patiently(
    streams: Streams, publications: Sequence[Publication], *, on_full: Callable[[QueueFull], object]
) -> Sequence[bool]:
    """`streams.publish`, again and again while the server is at maxmemory; `on_full` is told once.

    Raises: as `publish`, but never QueueFull.
    """
    said = False
    while True:
        try:
            return await streams.publish(publications)
        except QueueFull as error:
            if not said:
                on_full(error)
                said = True
            await asyncio.sleep(FULL_RETRY_S)
