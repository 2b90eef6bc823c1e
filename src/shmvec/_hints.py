"""Notes on exceptions whose messages do not say what to do."""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, _find_spec

with contextlib.suppress(ImportError):  # Windows lacks it
    import resource  # early: when it is needed, there may be no descriptor left to import it with

__all__ = [
    "add_note",
    "did_you_mean",
    "find_env_spec",
    "explain_process_limits",
    "action_hint",
    "env_fn_hint",
    "env_id_hint",
    "reset_hint",
    "reward_hint",
    "thread_hint",
    "refuse_unknown",
    "refuse_unknown_arguments",
    "can_be_called",
]

P = ParamSpec("P")
Owner = TypeVar("Owner")

# Namespaces of ids, and the module and package that register their envs.
_MODULES_BY_NAMESPACE = {"ALE": ("ale_py", "ale-py")}


def add_note(error: BaseException, note: str) -> None:
    """Adds a note unless it is empty, as ``add_note`` of exceptions does from Python 3.11 on."""
    if note:
        notes = [*getattr(error, "__notes__", ()), note]
        BaseException.__setattr__(error, "__notes__", notes)  # a frozen exception refuses setattr


def refuse_unknown(owner: str, options: Iterable[str], known_options: Iterable[str]) -> None:
    """Raises TypeError if an option is unknown, and suggests options that are spelt alike."""
    known_names = list(known_options)
    unknown = [name for name in options if name not in known_names]
    if unknown:
        hint = did_you_mean(unknown, known_names)
        if "num_envs" in unknown and "env_fns" in known_names:
            hint = ": there is an env for each function in env_fns, [make_env] * 8"
        raise TypeError(f"{owner} has no option {', '.join(map(repr, sorted(unknown)))}{hint}")


def refuse_unknown_arguments(
    init: Callable[Concatenate[Owner, P], None],
) -> Callable[Concatenate[Owner, P], None]:
    """Makes an ``__init__`` refuse unknown arguments as ``refuse_unknown`` does."""
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
    by_normalized = {_normalized(name): name for name in names}
    suggestions = [
        repr(by_normalized[close])
        for word in words
        for close in difflib.get_close_matches(_normalized(word), by_normalized, 1, likeness)
    ]
    return f". Did you mean {' and '.join(suggestions)}?" if suggestions else ""


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@contextlib.contextmanager
def explain_process_limits() -> Iterator[None]:
    """Adds the limits of processes and files to errors of starting processes and threads."""
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


def find_env_spec(id: str) -> EnvSpec:
    """Returns the spec of an env's id; Gymnasium's exception gets a hint."""
    try:
        return _find_spec(id)
    except gym.error.Error as error:
        add_note(error, env_id_hint(error))
        raise


def env_id_hint(error: BaseException) -> str:
    """A hint for an id whose module was not imported; "" if that is not the cause."""
    if isinstance(error, (gym.error.NamespaceNotFound, gym.error.NameNotFound)):
        for namespace, (module, package) in _MODULES_BY_NAMESPACE.items():
            if namespace in str(error).replace(".", " ").split() and module not in sys.modules:
                return (
                    f"`import {module}` registers the ids that begin with {namespace}/ "
                    f"(pip install {package}): import it first, or name it in the id, "
                    f'"{module}:{namespace}/...".'
                )
    return ""


def env_fn_hint(index: int, env_fn: Callable[[], Any], error: BaseException) -> str:
    """A hint for an env_fn that needs arguments, or else for the id that it names."""
    if not isinstance(error, TypeError) or can_be_called(env_fn):
        return env_id_hint(error)
    name = getattr(env_fn, "__name__", type(env_fn).__name__)
    callee = "make_env" if name == "<lambda>" else name
    return (
        f"env_fns[{index}] is called without arguments, and {name} takes "
        f"{inspect.signature(env_fn)}: write `lambda: {callee}(...)` with its arguments."
    )


def action_hint(index: int, env: Any, action: Any) -> str:
    """A hint for an env that raised in a step; "" if the action is in its action space."""
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


def reward_hint(reward: Any) -> str:
    """A hint for a reward that does not fit its space; "" if it is no number."""
    if not isinstance(reward, (int, float, np.number)):
        return ""
    return (
        "Its reward_space says that it has several. If a wrapper makes a number of them, set "
        "`reward_space = None` on that wrapper."
    )


def thread_hint(error: BaseException) -> str:
    """A hint for an env that raised because it is not in the main thread of its process."""
    if isinstance(error, ValueError) and "main thread" in str(error):
        return "With overlap= or spare_envs= each env lives in a thread of its own: leave both out."
    return ""


def reset_hint(index: int, env: Any, error: BaseException) -> str:
    """A hint for a reset that does not take Gymnasium's arguments; "" if it does."""
    if isinstance(error, TypeError):
        for each in (env, env.unwrapped):
            if not can_be_called(each.reset, seed=None, options=None):
                return (
                    f"The reset of env {index}, {type(each).__name__}.reset"
                    f"{inspect.signature(each.reset)}, must take a seed and options, as "
                    "Gymnasium's does: `def reset(self, *, seed=None, options=None)`, and return "
                    "(observation, info). Wrap an env of the old gym with shimmy's "
                    "GymV21CompatibilityV0(env=env)."
                )
    return ""


def has_parameter(function: Callable[..., Any], parameter: str, *arguments: Any) -> bool:
    """Whether a function has a parameter of this name that these arguments do not fill.

    ``**kwargs`` does not count: the function may pass them on to one that lacks the parameter.
    """
    try:
        bound = inspect.signature(function).bind_partial(*arguments)
    except (TypeError, ValueError):
        return False
    named = bound.signature.parameters.get(parameter)
    by_name = named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)
    return by_name and parameter not in bound.arguments


def can_be_called(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
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
