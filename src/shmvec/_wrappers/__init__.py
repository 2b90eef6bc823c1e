"""Wrappers, compiled: an env's chain of wrappers is looked at, and known ones are stepped in C.

``compiled(env)`` returns what steps the env: an object with its ``step``, or the env itself where
nothing is compiled. All else (``reset``, attributes, ``render``) is asked of the env, and its
wrappers keep their state. ``sources.py`` recognises code that twins are for, ``chain.pyx`` says how
the rest works, and each other compiled file has the twins of a family of wrappers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._wrappers.chain import Chain, Python, Twin, has_version
from shmvec._wrappers.sources import is_known

__all__ = [
    "HOMES",
    "TWINS",
    "code_of",
    "code_of_env",
    "compiled",
    "kinds_of",
    "notes_of",
    "summary_of",
]

# Twins, by the compiled file that has them.
_FILES = {
    "ale": "AtariEnv",  # which is an env
    "atari": "StickyActionEnv EpisodicLifeEnv Monitor",
    "checks": "PassiveEnvChecker OrderEnforcing TimeLimit Autoreset TimeAwareObservation",
    "normalising": "NormalizeObservation NormalizeReward",
    "pictures": "GrayscaleObservation FrameStackObservation",
    "rescaling": "RescaleAction RescaleObservation",
    "skipping": "MaxAndSkipEnv MaxAndSkipObservation AtariPreprocessing",
    "statistics": "RecordEpisodeStatistics",
    "transforms": "TransformObservation FlattenObservation TransformAction ClipAction "
    "TransformReward ClipReward",
}
TWINS = {name: file for file, names in _FILES.items() for name in names.split()}
# Envs that wrap nothing, by their classes' names: several versions have the same.
_ENVS = dict.fromkeys(
    ("AntEnv", "HalfCheetahEnv", "HopperEnv", "SwimmerEnv", "Walker2dEnv"), "mujoco"
)
HOMES = (  # modules that have what they are for
    "ale_py.env",
    "cleanrl_utils.atari_wrappers",  # Stable-Baselines3's, copied
    "gymnasium.wrappers",
    "stable_baselines3.common.atari_wrappers",
    "stable_baselines3.common.monitor",
)
# Classes of which other wrappers inherit their step: each has a twin that serves all of these.
_BASES = (gym.Wrapper, gym.ObservationWrapper, gym.ActionWrapper, gym.RewardWrapper)
# A frame of Python costs as little as a twin does: only with one of these a chain is compiled.
_PAYING = {
    "AtariPreprocessing",
    "FlattenObservation",
    "ClipAction",
    "ClipReward",
    "FrameStackObservation",
    "GrayscaleObservation",
    "MaxAndSkipEnv",
    "MaxAndSkipObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RescaleObservation",
}
_METHODS = ("observation", "action", "reward")  # which a step calls on its wrapper
_LOOKED_AT = ("step", *_METHODS, "action_space", "observation_space")
# Further methods that a twin knows; an __init__ makes the wrapper's func, which it knows, too.
_ALSO_LOOKED_AT = {
    "AtariEnv": ("_get_obs",),
    "FlattenObservation": ("__init__",),
    "ClipAction": ("__init__",),
    "ClipReward": ("__init__",),
    "GrayscaleObservation": ("__init__",),
}
# Methods and properties of MuJoCo envs that a twin need not ask for, if it knows them.
_OF_MUJOCO = (
    "do_simulation",
    "_step_mujoco_simulation",
    "dt",
    "state_vector",
    "_get_obs",
    "_get_rew",
    "control_cost",
    "is_healthy",
    "healthy_reward",
    "terminated",
    "contact_forces",
    "contact_cost",
)
# Those that mean the same whichever of these classes defines them.
_OF_ANY_MUJOCO = ("control_cost", "healthy_reward", "terminated")
_RESCALED_BY = {"RescaleAction": "backward", "RescaleObservation": "forward"}

_DEPTH_MOST = 1000  # of wrappers; an env may wrap itself
_AS_FAST = "Python is as fast"
Note = tuple[str, str]  # name of a wrapper's class, why it is not compiled; "": it is


def compiled(env: Any, always: bool = False) -> Any:
    """What steps an env: an object with the same ``step``; the env itself if nothing is compiled.

    Args:
        env: The env with its wrappers. It is left as it is.
        always: Whether it is compiled even where Python is as fast.
    """
    if not always and not _may_pay(env):
        return env  # not looked at any closer, which takes milliseconds
    chain = Chain(env, _built)
    return chain if always or _pays(chain) else env


def _classes(env: Any) -> list[type]:
    """The classes of an env's wrappers, the outermost first, and that of what they wrap."""
    classes = [type(env)]
    with contextlib.suppress(Exception):  # of an env that answers oddly when it is looked at
        while (env := _below(env)) is not None and len(classes) < _DEPTH_MOST:
            classes.append(type(env))
    return classes


def _may_pay(env: Any) -> bool:
    *wrappers, innermost = _classes(env)
    names = {each.__name__ for each in wrappers}
    return not _PAYING.isdisjoint(names) or any(
        each.__name__ in _ENVS for each in innermost.__mro__
    )


def _pays(chain: Chain) -> bool:
    return chain.steps_env or any(name in _PAYING and not why for name, why in chain.notes)


def notes_of(stepper: Any) -> list[Note]:
    """What is compiled of an env's wrappers, and why others are not; the outermost comes first.

    Args:
        stepper: What ``compiled`` has returned.
    """
    if isinstance(stepper, Chain):
        return list(stepper.notes)
    if not _may_pay(stepper):
        return [(each.__name__, _AS_FAST) for each in _classes(stepper)[:-1]]
    return [(name, why or _AS_FAST) for name, why in Chain(stepper, _built).notes]


def summary_of(stepper: Any) -> str:
    """How many of an env's wrappers are compiled, and what stops others; empty: it has none.

    Args:
        stepper: What ``compiled`` has returned.
    """
    notes = notes_of(stepper)
    if not notes:
        return ""
    names = [name for name, _ in notes]
    places = zip([*names[1:], "the env"], names, ["the caller", *names], strict=False)
    stopped = [
        f"{name} between {below} and {above}: {why}"
        for (below, name, above), (_, why) in zip(places, notes, strict=True)
        if why not in ("", _AS_FAST)
    ]
    count = sum(not why for _, why in notes)
    said = f"{count} of {len(notes)} compiled"
    if not stopped and not count:
        said += f" ({_AS_FAST})"
    return "; ".join([said, *stopped])


def _built(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    """What steps an env in a chain, and notes about its wrappers."""
    try:
        return _looked_through(env, chain)
    except Exception as error:  # of an env that answers oddly when it is looked at
        return Python(env, chain), [(type(env).__name__, f"looking at it raises {error!r}")]


def _looked_through(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    below = _below(env)
    if below is None:
        return _innermost(env, chain), []
    inner, notes = _built(below, chain)
    twin, why = _twin_of(env)
    notes = [(type(env).__name__, why), *notes]
    if twin is not None:
        return twin(env, chain, below, inner, _method(type(env))), notes
    if isinstance(inner, Python):
        return Python(env, chain, *inner.beneath), notes
    # What it wraps gets a chain of its own, to which this wrapper's `self.env.step` leads.
    beneath = Chain(below, _built)
    if _pays(beneath):
        return Python(env, chain, below, beneath), notes
    return Python(env, chain), notes


def _innermost(env: Any, chain: Chain) -> Any:
    """What steps an env that wraps nothing."""
    kind = type(env)
    name = kind.__name__
    if name == "AtariEnv" and kind in kinds_of(name) and not _difference(kind):
        return getattr(import_module(f"{__name__}.{TWINS[name]}"), name)(env, chain)
    code = list(code_of_env(kind))
    names = [name.split(".") for name, function in code if is_known(function, name)]
    known = frozenset(method for _, method in names)
    chain.steps_env = "step" in known and known.isdisjoint(vars(env)) and not _unseen(kind)
    if not chain.steps_env:
        return Python(env, chain)
    name = names[0][0]  # of the class that defines the step
    return getattr(import_module(f"{__name__}.{_ENVS[name]}"), name)(env, chain, known)


def _below(env: Any) -> Any:
    """The env that a wrapper wraps; None: it is no wrapper, as far as can be seen.

    Its ``__dict__`` is left alone: once that was asked for, Python 3.11 and 3.12 take longer for
    each of its attributes, by which a step of CartPole takes 6 % longer.
    """
    if _of_class(type(env), "env") is None:
        try:
            below = object.__getattribute__(env, "env")
        except AttributeError:
            return None
    else:
        own = getattr(env, "__dict__", None)
        below = own.get("env") if type(own) is dict else None
    return below if isinstance(below, gym.Env) else None


def _method(kind: type) -> str | None:
    return next((name for name in _METHODS if hasattr(kind, name)), None)


def _twin_of(wrapper: Any) -> tuple[type[Twin] | None, str]:
    """The twin that can take a wrapper's place; None, and the reason why there is none."""
    kind = type(wrapper)
    name = kind.__name__
    if name not in TWINS or kind not in kinds_of(name):
        return _twin_by_base(wrapper)
    for attribute in vars(wrapper):
        if _of_class(kind, attribute) is not None:
            return None, f"its {attribute} has been replaced"
    difference = _difference(kind)
    if difference:
        return None, difference
    if not _has_own_func(wrapper):
        name = next(each.__name__ for each in kind.__mro__ if each.__name__.startswith("Transform"))
    twin: type[Twin] = getattr(import_module(f"{__name__}.{TWINS[name]}"), name)
    return twin, ""


def _twin_by_base(wrapper: Any) -> tuple[type[Twin] | None, str]:
    """The twin of a wrapper whose class inherits its step, and the reason why there is none."""
    kind = type(wrapper)
    base = next(each for each in kind.__mro__ if "step" in vars(each))
    if base not in _BASES:
        return None, "it has no twin"
    for attribute in ("env", "step", *_METHODS):
        if attribute in vars(wrapper) and _of_class(kind, attribute) is not None:
            return None, f"its {attribute} has been replaced"
    if not is_known(vars(base)["step"], f"{base.__name__}.step"):
        return None, f"{base.__name__}.step is not the one that its twin is for"
    why = _unseen(kind)
    if why:
        return None, why
    twin: type[Twin] = getattr(import_module(f"{__name__}.inherited"), base.__name__)
    return twin, ""


def kinds_of(name: str) -> list[type[Any]]:
    """The classes that a twin of this name is for, of the libraries that are imported."""
    homes = (vars(sys.modules[home]) for home in HOMES if sys.modules.get(home))
    return [home[name] for home in homes if name in home]


def code_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and properties that the twin of a class knows, each with its name."""
    outermost = gym.Wrapper if issubclass(kind, gym.Wrapper) else kind
    for each in kind.__mro__[: kind.__mro__.index(outermost) + 1]:
        for method in _LOOKED_AT:
            if method in vars(each):
                yield f"{each.__name__}.{method}", vars(each)[method]
    name = kind.__name__
    for method in _ALSO_LOOKED_AT.get(name, ()):
        yield f"{name}.{method}", _of_class(kind, method)
    if name.startswith("Normalize"):
        from gymnasium.wrappers import utils

        for method in ("update", "update_from_moments"):
            yield f"RunningMeanStd.{method}", vars(utils.RunningMeanStd)[method]
        helper = utils.update_mean_var_count_from_moments
        yield "update_mean_var_count_from_moments", helper
    elif name in _RESCALED_BY:
        yield "rescale_box", gym.wrappers.utils.rescale_box
    elif name == "FlattenObservation":
        yield "_flatten_box_multibinary", gym.spaces.utils.flatten.dispatch(gym.spaces.Box)
    elif name == "FrameStackObservation":
        called: Any = vars(sys.modules[kind.__module__])["concatenate"]
        if called is gym.vector.utils.concatenate:
            called = called.dispatch(gym.spaces.Box)
        yield "_concatenate_base", called


def code_of_env(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and properties of an env's class that its twin may know, each with its name."""
    base = _definer(kind, "step")
    if base is not None and base.__name__ in _ENVS:
        for name in ("step", *_OF_MUJOCO):
            definer = _definer(kind, name)
            if definer is not None and (definer is base or definer.__name__ == "MujocoEnv"):
                owner = "MujocoEnv" if name in _OF_ANY_MUJOCO else definer.__name__
                yield f"{owner}.{name}", vars(definer)[name]


def _difference(kind: type) -> str:
    """How a class of wrappers differs from the one that its twin is for; empty if it does not."""
    for name, function in code_of(kind):
        if not is_known(function, name):
            return f"{name} is not the one that its twin is for"
    kinds = [kind]
    if kind.__name__.startswith("Normalize"):
        from gymnasium.wrappers.utils import RunningMeanStd

        kinds.append(RunningMeanStd)
        if not {"mean", "var", "count"}.isdisjoint(dir(RunningMeanStd)):
            return "an attribute of its RunningMeanStd has been replaced"
    for each in kinds:
        if _of_class(each, "__setattr__") is not vars(object)["__setattr__"]:
            return "it has a __setattr__"
        if _of_class(each, "__getattr__") is not None:
            return "it has a __getattr__"
    return next(filter(None, map(_unseen, kinds)), "")


def _of_class(kind: type, name: str) -> Any:
    """An attribute of a class or its bases, as it is defined; None: there is none."""
    definer = _definer(kind, name)
    return None if definer is None else vars(definer)[name]


def _definer(kind: type, name: str) -> type | None:
    """The class that defines an attribute, a class itself or one of its bases."""
    return next((each for each in kind.__mro__ if name in vars(each)), None)


def _unseen(kind: type) -> str:
    """Why a twin would not see what a class does; empty: it does."""
    if _of_class(kind, "__getattribute__") is not vars(object)["__getattribute__"]:
        return "it has a __getattribute__"
    hasattr(kind, "step")  # so that it has a version
    return "" if has_version(kind) else f"changes of {kind.__name__} would not be noticed"


def _has_own_func(wrapper: Any) -> bool:
    """Whether a wrapper's func, if its twin knows that, is the one that its class makes."""
    kind = type(wrapper)
    name = kind.__name__
    if name in _RESCALED_BY:
        maker = gym.wrappers.utils.rescale_box
    elif "__init__" in _ALSO_LOOKED_AT.get(name, ()):
        maker = _of_class(kind, "__init__")
    else:
        return True
    func = getattr(wrapper, "func", None)
    return (
        type(func) is FunctionType
        and func.__code__ in maker.__code__.co_consts
        and _RESCALED_BY.get(name, func.__code__.co_name) == func.__code__.co_name
        and not func.__defaults__
        and not func.__kwdefaults__
        and func.__globals__.get("np", np) is np
    )
