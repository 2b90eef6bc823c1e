"""A space for anything, the space of rewards, and functions on values nested as their space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector.utils import create_shared_memory

__all__ = ["Anything", "batched", "mapped", "one_of", "refuse_reward_space", "reward_space_of"]

Space = gym.Space[Any]

# Spaces whose batches are one array.
ARRAY_SPACES = gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiBinary, gym.spaces.MultiDiscrete


# Wrappers that convert a reward to a float, by package.
_SCALAR_REWARD_WRAPPERS = {
    "gymnasium": ("AtariPreprocessing", "MaxAndSkipObservation", "NormalizeReward"),
    "stable_baselines3": ("ClipRewardEnv", "MaxAndSkipEnv", "Monitor"),
}


class Anything(gym.Space[Any]):
    """The space of anything that can be pickled; values are sent as messages."""

    def __init__(self) -> None:
        """Makes the space, which has no shape and no dtype."""
        super().__init__()

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError("the space of anything cannot be sampled")

    def contains(self, x: Any) -> bool:
        """Returns True."""
        return True

    def __eq__(self, other: object) -> bool:
        """Whether the other is an ``Anything``, too."""
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]


@create_shared_memory.register(Anything)
def _create_no_array(space: Anything, n: int = 1, ctx: Any = None) -> None:
    """Makes no shared array, since such values are sent as messages."""


def reward_space_of(env: Any) -> gym.spaces.Box | None:
    """The space of an env's rewards if they have more than one number; None: they are numbers.

    That is the ``reward_space`` of the outermost wrapper that has one, or of the env, if it is a
    Box of shape ``(k,)`` with k > 1, as MO-Gymnasium's envs have it. Below MO-Gymnasium's
    ``LinearReward`` rewards are numbers, and below another wrapper whose ``reward_space`` is None.

    Raises:
        TypeError: The env is in a wrapper of Gymnasium's or Stable-Baselines3's that needs numbers.

    Example:
        >>> import gymnasium as gym
        >>> env = gym.make("CartPole-v1")
        >>> env.unwrapped.reward_space = gym.spaces.Box(0, 1, (2,))
        >>> reward_space_of(env)
        Box(0.0, 1.0, (2,), float32)
        >>> env = gym.wrappers.TransformReward(env, sum)
        >>> env.reward_space = None
        >>> reward_space_of(env) is None
        True
    """
    scalar_wrapper = None
    while env is not None:
        name, home = type(env).__name__, type(env).__module__.partition(".")[0]
        if (home, name) == ("mo_gymnasium", "LinearReward"):
            return None
        if scalar_wrapper is None and name in _SCALAR_REWARD_WRAPPERS.get(home, ()):
            scalar_wrapper = name
        try:
            space = env.reward_space
        except Exception:  # it has none, or raises anything when the attribute is read
            env = env.env if isinstance(env, gym.Wrapper) else None
            continue
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.shape[0] < 2:
            return None
        if scalar_wrapper is not None:
            raise TypeError(
                f"the env is in a {scalar_wrapper}, which needs rewards that are numbers, and "
                f"those of {type(env).__name__} are arrays: its reward_space is {space}. Use a "
                "wrapper for arrays, such as mo_gymnasium's MONormalizeReward, or leave it out"
            )
        return space
    return None


def refuse_reward_space(space: gym.spaces.Box | None, what: str) -> None:
    """Raises TypeError if rewards have more than one number.

    Args:
        space: The ``reward_space`` of a vector env; None: they are numbers.
        what: The class or function that needs numbers, for the message.
    """
    if space is not None:
        raise TypeError(
            f"{what} needs rewards that are numbers, and those of these envs are arrays: their "
            f"reward_space is {space}. Convert them to numbers in the env function, for example by "
            "mo_gymnasium.wrappers.LinearReward(env, weight); another wrapper that does so needs "
            "`reward_space = None`"
        )


def mapped(space: Space, leaf: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to the parts of nested values; the results are nested likewise.

    Args:
        space: The space; values are nested as its Dicts and Tuples.
        leaf: The function, called once for each part, with that part of every value.
        *values: Values of this space, or batches of it.

    Example:
        >>> from gymnasium.spaces import Dict, Discrete, Tuple
        >>> mapped(Dict(x=Discrete(2), y=Tuple([Discrete(3)])), len, {"x": [0, 1], "y": ([2, 0],)})
        {'x': 2, 'y': (2,)}
    """
    if isinstance(space, gym.spaces.Dict):
        return {
            key: mapped(part, leaf, *(value[key] for value in values))
            for key, part in space.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            mapped(part, leaf, *part_values)
            for part, *part_values in zip(space.spaces, *values, strict=True)
        )
    return leaf(*values)


def one_of(space: Space, batch: Any, index: int) -> Any:
    """Returns one value of a batch; its arrays are views."""
    return mapped(space, lambda values: values[index], batch)


def batched(space: Any, actions: Sequence[Any]) -> Any:
    """Converts a list of actions to a batch of a Dict or Tuple space: a dict or tuple of lists.

    Args:
        space: Action space of one env.
        actions: One action for each env.

    Returns:
        The values by key or place, each in a list; for all other spaces the list itself.

    Raises:
        ValueError: An action lacks a key or has another number of parts.

    Example:
        >>> from gymnasium.spaces import Dict, Discrete
        >>> from shmvec.spaces import batched
        >>> batched(Dict(x=Discrete(2), y=Discrete(3)), [{"x": 0, "y": 2}, {"x": 1, "y": 0}])
        {'x': [0, 1], 'y': [2, 0]}
    """
    if isinstance(space, gym.spaces.Dict):
        keys, expected = list(space.keys()), f"a dict with the keys {list(space.keys())}"
        fitting = [hasattr(each, "keys") and set(each.keys()) == set(keys) for each in actions]
    elif isinstance(space, gym.spaces.Tuple):
        keys, expected = list(range(len(space))), f"a tuple of {len(space)} parts"
        fitting = [isinstance(each, (tuple, list)) and len(each) == len(keys) for each in actions]
    else:
        return actions
    if not all(fitting):
        place = fitting.index(False)  # not the env's index: the actions may be for some envs only
        raise ValueError(
            f"wrong actions: [{place}] must be {expected}, got {actions[place]!r}. Nothing was "
            "sent to any env."
        )
    parts = {key: batched(space[key], [each[key] for each in actions]) for key in keys}
    return parts if isinstance(space, gym.spaces.Dict) else tuple(parts.values())
