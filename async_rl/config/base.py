"""The strict base of every config model: unknown keys are errors, values are frozen."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

SHORTEST_S: Final = 0.01
LONGEST_S: Final = 30 * 24 * 3600.0
"""What a duration may be: between a poll and a month. What is outside was meant otherwise (milliseconds, "for ever")."""
MOST: Final = 10**9
"""Of anything that is counted: far above any run, and it fits wherever a count goes (Lua, int64)."""
LONGEST_TOKENS: Final = 2**24
"""Of one sequence."""
MOST_PROCESSES: Final = 2**16
"""Of one kind."""


class StrictModel(BaseModel):
    """Frozen; refuses unknown keys, silent conversions and infinite numbers. A field's docstring is its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )
