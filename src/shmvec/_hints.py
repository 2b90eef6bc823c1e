"""Hints: notes on exceptions that do not say by themselves what to do."""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, _find_spec

__all__ = [
    "add_note",
    "did_you_mean",
    "found_spec",
    "naming_limits",
    "of_action",
    "of_env_fn",
    "of_id",
    "of_reset",
    "of_thread",
    "refuse_unknown",
    "refusing_unknown",
    "takes",
]

P = ParamSpec("P")
Owner = TypeVar("Owner")

# Namespaces of ids, and the module and package that register their envs.
_NAMESPACES = {"ALE": ("ale_py", "ale-py")}


def add_note(error: BaseException, note: str) -> None:
    """Adds a note unless it is empty, as ``add_note`` of exceptions does from Python 3.11 on."""
    if note:
        notes = [*getattr(error, "__notes__", ()), note]
        BaseException.__setattr__(error, "__notes__", notes)  # a frozen one's class refuses


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError if an option is not known, with the known ones that are spelt alike."""
    names = list(known)
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = did_you_mean(unknown, names)
        if "num_envs" in unknown and "env_fns" in names:
            hint = ": there is an env for each function in env_fns, [make_env] * 8"
        raise TypeError(f"{owner} has no option {', '.join(map(repr, sorted(unknown)))}{hint}")


def refusing_unknown(
    init: Callable[Concatenate[Owner, P], None],
) -> Callable[Concatenate[Owner, P], None]:
    """Has an ``__init__`` refuse unknown arguments as ``refuse_unknown`` does."""
    known = list(inspect.signature(init).parameters)

    @wraps(init)
    def checked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        refuse_unknown(type(self).__name__, kwargs, known)
        init(self, *args, **kwargs)

    return checked


def did_you_mean(words: Iterable[str], names: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a message, with the names that are spelt like the words; "" if none is.

    Args:
        words: Words that are none of the names.
        names: The names to choose from; capitals, hyphens and underscores do not count.
        likeness: How much alike a word and a name must be, from 0 to 1.
    """
    plain = {_plain(name): name for name in names}
    meant = [
        repr(plain[close])
        for word in words
        for close in difflib.get_close_matches(_plain(word), plain, 1, likeness)
    ]
    return f". Did you mean {' and '.join(meant)}?" if meant else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@contextlib.contextmanager
def naming_limits() -> Iterator[None]:
    """A context for starting processes and threads: adds the limits to an error."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        note = ""
        if isinstance(error, BlockingIOError) or "new thread" in str(error):
            limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            note = (
                "No more processes and threads may be started. This user's limit is "
                f"{'none' if limit == resource.RLIM_INFINITY else limit} "
                "(RLIMIT_NPROC, `ulimit -u`), and a container has one of its own; `python -m "
                "shmvec doctor` says how many are left. A worker needs two, besides those that "
                "its env and libraries start, and this program one: raise the limit, or give "
                "fewer num_workers."
            )
        elif getattr(error, "errno", None) == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            note = (
                f"This process may have {limit} files open (RLIMIT_NOFILE, `ulimit -n`), and a "
                "vector env needs some for each worker; `python -m shmvec doctor` says how many "
                "are left: raise the limit, or give fewer num_workers."
            )
        if note:
            add_note(error, note)
        raise


def found_spec(id: str) -> EnvSpec:
    """The spec of an env's id, or Gymnasium's exception with a hint."""
    try:
        return _find_spec(id)
    except gym.error.Error as error:
        add_note(error, of_id(error))
        raise


def of_id(error: BaseException) -> str:
    """The hint for an id whose module was not imported; "" if that is not the cause."""
    if isinstance(error, (gym.error.NamespaceNotFound, gym.error.NameNotFound)):
        for namespace, (module, package) in _NAMESPACES.items():
            if namespace in str(error).replace(".", " ").split() and module not in sys.modules:
                return (
                    f"`import {module}` registers the ids that begin with {namespace}/ "
                    f"(pip install {package}): import it first, or name it in the id, "
                    f'"{module}:{namespace}/...".'
                )
    return ""


def of_env_fn(index: int, env_fn: Callable[[], Any], error: BaseException) -> str:
    """The hint for an env_fn that cannot be called without arguments, else that of its id."""
    if not isinstance(error, TypeError) or takes(env_fn):
        return of_id(error)
    name = getattr(env_fn, "__name__", type(env_fn).__name__)
    called = "make_env" if name == "<lambda>" else name
    return (
        f"env_fns[{index}] is called without arguments, and {name} takes "
        f"{inspect.signature(env_fn)}: write `lambda: {called}(...)` with its arguments."
    )


def of_action(index: int, env: Any, action: Any) -> str:
    """The hint for an env that raised in a step; "" if the action is in its action space."""
    space = env.action_space
    if space.contains(action):
        return ""
    hint = f"Env {index} was given the action {action!r}, which is not in its space, {space}"
    shape = getattr(action, "shape", None)
    if shape is not None and space.shape is not None and shape != space.shape:
        hint += (
            f": it has shape {shape}, and needs {space.shape}. The actions of all envs need shape "
            f"(num_envs{''.join(f', {axis}' for axis in space.shape) or ','})"
        )
        if shape == (*space.shape, 1):
            hint += ": give actions.squeeze(-1)"
    return f"{hint}."


def of_thread(error: BaseException) -> str:
    """What to do about an env that raised because it is not in its process's main thread."""
    if isinstance(error, ValueError) and "main thread" in str(error):
        return "With overlap= or spare_envs= each env lives in a thread of its own: leave both out."
    return ""


def of_reset(index: int, env: Any, error: BaseException) -> str:
    """The hint for a reset that does not take Gymnasium's arguments; "" if it does."""
    if isinstance(error, TypeError):
        for each in (env, env.unwrapped):
            if not takes(each.reset, seed=None, options=None):
                return (
                    f"The reset of env {index}, {type(each).__name__}.reset"
                    f"{inspect.signature(each.reset)}, must take a seed and options, as "
                    "Gymnasium's does: `def reset(self, *, seed=None, options=None)`, and return "
                    "(observation, info). Wrap an env of the old gym with shimmy's "
                    "GymV21CompatibilityV0(env=env)."
                )
    return ""


def names(function: Callable[..., Any], parameter: str, *arguments: Any) -> bool:
    """Whether a function names a parameter that is given by name, beside these arguments.

    ``**kwargs`` names none: a function that hands them on may hand them to one that takes none.
    """
    try:
        bound = inspect.signature(function).bind_partial(*arguments)
    except (TypeError, ValueError):
        return False
    found = bound.signature.parameters.get(parameter)
    by_name = found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)
    return by_name and parameter not in bound.arguments


def takes(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether a function can be called with these arguments; True if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True
