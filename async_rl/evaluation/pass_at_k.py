"""pass@k without bias, and its interval. Prompts are the independent units; completions of one prompt are not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_rl.run_dir.evaluations import Estimate

Z_95 = 1.959963984540054
"""0.975 quantile of the standard normal distribution."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k completions passes, from c passes among n.

    1 − C(n − c, k)/C(n, k). Source: Chen et al. 2021, eq. 1 (arXiv:2107.03374).
    Raises: ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass_at_k n={n} c={c} k={k}: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """Mean of pass@k over prompts, from (n, c) of each, with a 95 % interval; prompts with n < k are left out.

    None if none has enough completions.
    """
    values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not values:
        return None
    mean = sum(values) / len(values)
    completions = sum(n for n, _ in counts if n >= k)
    low, high = clustered_interval(values, most=completions / k)
    return Estimate(value=mean, low=low, high=high, prompts=len(values))


def clustered_interval(values: Sequence[float], *, most: float, z: float = Z_95) -> tuple[float, float]:
    """Interval for the mean of one value in [0, 1] per prompt: Wilson's score interval at the effective sample size.

    The effective size is what a binomial share would need for the variance seen between prompts, p(1 − p)/(s²/N), and at most
    `most`. It is N where nothing can be seen: every prompt passes, or none does; then the interval is not of width 0.
    Source: Wilson 1927; the effective size: Korn and Graubard 1998, Survey Methodology 24.
    Raises: ValueError without values.
    """
    count = len(values)
    if not count:
        raise ValueError("clustered_interval: needs at least one value")
    mean = sum(values) / count
    spread = mean * (1.0 - mean)
    variance = sum((value - mean) ** 2 for value in values) / max(1, count - 1) / count
    if spread <= 0.0 or count == 1:
        return wilson(mean, count, z=z)
    return wilson(mean, min(most, spread / variance) if variance > 0.0 else most, z=z)


def wilson(share: float, size: float, *, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share among `size` trials."""
    centre = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)
