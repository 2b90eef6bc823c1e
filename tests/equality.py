"""Equality as users of a drop-in mean it: types, dtypes, orders of keys and NaN included."""

import numpy as np


def same(ours, theirs):
    """Equality that knows dtypes, orders of keys and NaN."""
    if isinstance(theirs, dict):
        return (
            type(ours) is type(theirs)
            and list(ours) == list(theirs)
            and all(same(ours[key], theirs[key]) for key in theirs)
        )
    if isinstance(theirs, np.ndarray):
        return (
            isinstance(ours, np.ndarray)
            and ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and all(same(a, b) for a, b in zip(ours.ravel(), theirs.ravel(), strict=True))
        )
    if isinstance(theirs, (list, tuple)):
        return (
            type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
        )
    equal = ours == theirs or (ours != ours and theirs != theirs)
    return type(ours) is type(theirs) and bool(equal)
