"""Tables of parameters: by default each value is tried once; ``-m deep`` tries the rest."""

import itertools
from contextlib import contextmanager

import pytest


def deep(*rows):
    """Rows that only ``-m deep`` tries: a tuple has a value for each of several parameters."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=pytest.mark.deep) for row in rows]


def first(rows):
    """Rows that all show the same promise: only the first one is tried by default."""
    shown, *others = (
        getattr(row, "values", row) if isinstance(row, tuple) else row for row in rows
    )
    return [shown, *deep(*others)]


def paired(*columns):
    """Rows that show each value of several parameters with two of each other's, where there are.

    Only the first one is tried by default.
    """
    columns = [list(column) for column in columns]
    most = max(len(column) for column in columns)
    places = [
        tuple((row + shift * at) % len(column) for at, column in enumerate(columns))
        for shift in range(2)
        for row in range(most)
    ]
    return first(
        tuple(column[place] for column, place in zip(columns, row, strict=True))
        for row in dict.fromkeys(places)
    )


def crossed(*columns, shown=None):
    """All combinations of the values of several parameters, for ``pytest.mark.parametrize``.

    Those in `shown`, else as many as show each value once, run by default; the others are deep.
    """
    columns = [list(column) for column in columns]
    most = max(len(column) for column in columns)
    default = {tuple(row % len(column) for column in columns) for row in range(most)}
    rows = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        values = tuple(column[place] for column, place in zip(columns, places, strict=True))
        by_default = places in default if shown is None else values in shown
        rows.append(pytest.param(*values, marks=() if by_default else pytest.mark.deep))
    return rows


@contextmanager
def row(*values):
    """Names a row of a table in what its checks raise, where all rows are one test."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"of the row {values}: {error}") from error
