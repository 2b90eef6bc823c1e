"""Statistics of returns: interquartile means, standard errors and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = [
    "STATISTICS",
    "Values",
    "confidence_interval",
    "interquartile_mean",
    "means",
    "standard_error",
]

Values = npt.NDArray[np.float64]
_AT_ONCE = 1 << 22  # values of resamples that are in memory at a time


def interquartile_mean(values: Values) -> float:
    """The mean of the middle half: a quarter of the values is left out at either end.

    Example:
        >>> interquartile_mean(np.array([1.0, 2.0, 4.0, 100.0]))
        3.0
    """
    return float(_interquartile_means(values[None])[0]) if len(values) else float("nan")


def standard_error(values: Values) -> float:
    """The standard error of the values' mean; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):  # raised by infinite values
        return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _interquartile_means(values: Values) -> Values:
    cut = values.shape[1] // 4
    ordered = np.sort(values, axis=1)
    return means(ordered[:, cut : values.shape[1] - cut])


def means(values: Values) -> Values:
    """The means of the rows; nan where there are infinite values of both signs."""
    with np.errstate(invalid="ignore"):
        found: Values = values.mean(axis=1)
    return found


# Each takes a matrix, and returns one value for each row.
STATISTICS: dict[str, Callable[[Values], Values]] = {
    "interquartile_mean": _interquartile_means,
    "mean": means,
}


def confidence_interval(
    values: Values, statistic: str, level: float, samples: int, seed: int
) -> tuple[float, float]:
    """A percentile bootstrap's interval of a statistic.

    Args:
        values: float64 ``(n,)``.
        statistic: One of ``STATISTICS``.
        level: The interval's confidence level, 0.95 for example.
        samples: Number of resamples.
        seed: Seed of the resampling.

    Returns:
        The interval's lower and upper end; nan where there are no values.

    Raises:
        ValueError: There is no such statistic, or the level is not between 0 and 1.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if not 0 < level < 1 or samples < 1:
        raise ValueError(
            f"level must lie between 0 and 1, and samples be positive, got {level} and {samples}"
        )
    if not len(values):
        return float("nan"), float("nan")
    each = STATISTICS[statistic]
    random = np.random.default_rng(seed)
    found = _resampled(values, each, samples, random)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(found, (50 * (1 - level), 50 * (1 + level)))
    return float(low), float(high)


def _resampled(
    values: Values,
    each: Callable[[Values], Values],
    samples: int,
    random: np.random.Generator,
) -> Values:
    found = np.empty(samples)
    some = max(1, _AT_ONCE // len(values))
    for begin in range(0, samples, some):
        end = min(samples, begin + some)
        drawn = random.integers(len(values), size=(end - begin, len(values)))
        found[begin:end] = each(values[drawn])
    return found
