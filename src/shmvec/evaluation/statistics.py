"""Statistics of groups of returns: means, interquartile means, errors, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["STATISTICS", "Values", "confidence_interval", "standard_error", "statistic_of"]

Values = npt.NDArray[np.float64]
_MAX_VALUES = 1 << 22  # of resamples that are in memory at a time


def statistic_of(groups: Sequence[Values], statistic: str) -> float:
    """A statistic of groups of values; nan if there are none.

    The mean is that of the groups' means, so that each group has the same weight. The interquartile
    mean is that of all values together, as in rliable: the mean of their middle half.

    Args:
        groups: Arrays of values. Empty ones do not count.
        statistic: One of ``STATISTICS``.

    Example:
        >>> statistic_of([np.array([1.0, 2.0, 4.0, 100.0])], "interquartile_mean")
        3.0
    """
    filled = [group[None] for group in groups if len(group)]
    return float(STATISTICS[statistic](filled)[0]) if filled else float("nan")


def standard_error(values: Values) -> float:
    """The standard error of the values' mean; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):  # raised by infinite values
        return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _interquartile_means(groups: Sequence[Values]) -> Values:
    ordered = np.sort(np.concatenate(groups, axis=1), axis=1)
    cut = ordered.shape[1] // 4
    result = _means_of_rows(ordered[:, cut : ordered.shape[1] - cut])
    result[np.isnan(ordered[:, -1])] = np.nan  # nans are sorted to the end, and would be cut off
    return result


def _means(groups: Sequence[Values]) -> Values:
    return _means_of_rows(np.stack([_means_of_rows(group) for group in groups], axis=1))


def _means_of_rows(values: Values) -> Values:
    """The means of the rows; nan where there are infinite values of both signs."""
    with np.errstate(invalid="ignore"):
        result: Values = values.mean(axis=1)
    return result


# Each takes a matrix for each group, and returns one value for each row.
STATISTICS: dict[str, Callable[[Sequence[Values]], Values]] = {
    "interquartile_mean": _interquartile_means,
    "mean": _means,
}


def confidence_interval(
    groups: Sequence[Values], statistic: str, level: float, samples: int, seed: int
) -> tuple[float, float]:
    """The interval of a statistic, by a percentile bootstrap that resamples within each group.

    Args:
        groups: As for :func:`statistic_of`.
        statistic: As for :func:`statistic_of`.
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
    groups = [group for group in groups if len(group)]
    if not groups:
        return float("nan"), float("nan")
    random = np.random.default_rng(seed)
    results = np.empty(samples)
    chunk = max(1, _MAX_VALUES // sum(map(len, groups)))
    for begin in range(0, samples, chunk):
        end = min(samples, begin + chunk)
        resamples = [
            group[random.integers(len(group), size=(end - begin, len(group)))] for group in groups
        ]
        results[begin:end] = STATISTICS[statistic](resamples)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(results, (50 * (1 - level), 50 * (1 + level)))
    return float(low), float(high)
