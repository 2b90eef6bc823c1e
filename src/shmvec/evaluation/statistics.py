"""Statistics of returns: interquartile means, standard errors and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "STATISTICS",
    "Values",
    "confidence_interval",
    "grouped_statistic",
    "interquartile_mean",
    "means",
    "standard_error",
    "stratified_interval",
]

Values = npt.NDArray[np.float64]
_MAX_VALUES = 1 << 22  # of resamples that are in memory at a time


def interquartile_mean(values: Values) -> float:
    """The mean of the middle half of the values, without the lowest and the highest quarter.

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
    result = means(ordered[:, cut : values.shape[1] - cut])
    result[np.isnan(ordered[:, -1])] = np.nan  # nans are sorted to the end, and would be cut off
    return result


def means(values: Values) -> Values:
    """The means of the rows; nan where there are infinite values of both signs."""
    with np.errstate(invalid="ignore"):
        result: Values = values.mean(axis=1)
    return result


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
    groups = [values] if len(values) else []
    return stratified_interval(groups, statistic, level, samples, seed)


def grouped_statistic(groups: Sequence[Values], statistic: str) -> float:
    """A statistic over groups of values.

    The mean is that of the groups' means, so that each group has the same weight. The interquartile
    mean is that of all values together, as in rliable.

    Args:
        groups: Arrays of values, none of them empty.
        statistic: One of ``STATISTICS``.
    """
    return float(_over_groups([group[None] for group in groups], statistic)[0])


def _over_groups(groups: Sequence[Values], statistic: str) -> Values:
    """A statistic over groups of matrices, one value for each row."""
    if statistic == "mean":
        return means(np.stack([means(group) for group in groups], axis=1))
    return STATISTICS[statistic](np.concatenate(groups, axis=1))


def stratified_interval(
    groups: Sequence[Values], statistic: str, level: float, samples: int, seed: int
) -> tuple[float, float]:
    """The interval of a statistic over groups, by a bootstrap that resamples within each group.

    Args:
        groups: As for :func:`grouped_statistic`.
        statistic: As for :func:`grouped_statistic`.
        level: The interval's confidence level.
        samples: Number of resamples.
        seed: Seed of the resampling.

    Returns:
        The interval's lower and upper end; nan where there are no values.

    Raises:
        ValueError: As :func:`confidence_interval`.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if not 0 < level < 1 or samples < 1:
        raise ValueError(
            f"level must lie between 0 and 1, and samples be positive, got {level} and {samples}"
        )
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
        results[begin:end] = _over_groups(resamples, statistic)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(results, (50 * (1 - level), 50 * (1 + level)))
    return float(low), float(high)
