"""Certificates for a rediss:// address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Without `ca` the system's authorities are trusted; the server's certificate is always verified.

    cert and key: this client's own, where the server asks for one.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def as_redis_arguments(self) -> dict[str, str]:
        """As redis-py's connection takes them."""
        files = {"ssl_ca_certs": self.ca, "ssl_certfile": self.cert, "ssl_keyfile": self.key}
        return {name: str(path) for name, path in files.items() if path is not None}
