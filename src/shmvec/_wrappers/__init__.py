"""Compiled wrappers: the known ones among an env's wrappers are stepped in C.

``compile_env(env)`` returns an object whose ``step`` steps the env, or the env itself if nothing is
compiled. Everything else (``reset``, attributes, ``render``) stays with the env, and its wrappers
keep their state. ``sources.py`` recognises the code for which there are twins, ``chain.pyx`` says
how the rest works, and each other compiled file has the twins of a family of wrappers.
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

from shmvec._wrappers.chain import Chain, PythonStepper, Twin, has_version
from shmvec._wrappers.sources import is_known

__all__ = [
    "SOURCE_MODULES",
    "TWINS",
    "classes_of",
    "code_of",
    "code_of_env",
    "compile_env",
    "notes_of",
    "summary_of",
]

_TWINS_BY_FILE = {
    "atari": "AtariEnv StickyActionEnv EpisodicLifeEnv",  # the first is an env, and not a wrapper
    "episodes": "PassiveEnvChecker OrderEnforcing TimeLimit Autoreset TimeAwareObservation "
    "RecordEpisodeStatistics Monitor",
    "normalising": "NormalizeObservation NormalizeReward",
    "pictures": "GrayscaleObservation FrameStackObservation",
    "rescaling": "RescaleAction RescaleObservation",
    "skipping": "MaxAndSkipEnv MaxAndSkipObservation AtariPreprocessing",
    "transforms": "TransformObservation FlattenObservation TransformAction ClipAction "
    "TransformReward ClipReward",
}
TWINS = {name: file for file, names in _TWINS_BY_FILE.items() for name in names.split()}
# The files of envs that wrap nothing, by class. Several versions of an env have the same name.
_ENVS = dict.fromkeys(
    ("AntEnv", "HalfCheetahEnv", "HopperEnv", "SwimmerEnv", "Walker2dEnv"), "mujoco"
)
SOURCE_MODULES = (  # modules with the classes that have twins
    "ale_py.env",
    "cleanrl_utils.atari_wrappers",  # Stable-Baselines3's, copied
    "gymnasium.wrappers",
    "stable_baselines3.common.atari_wrappers",
    "stable_baselines3.common.monitor",
)
# Classes from which other wrappers inherit their step. One twin serves all wrappers of a base.
_BASES = (gym.Wrapper, gym.ObservationWrapper, gym.ActionWrapper, gym.RewardWrapper)
# Other twins are as slow as a frame of Python: a chain is only compiled if it has one of these.
_FASTER_TWINS = {
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
_HOOKS = ("observation", "action", "reward")  # called by a step on its wrapper
_CHECKED_ATTRIBUTES = ("step", *_HOOKS, "action_space", "observation_space")
# Further methods that a twin replaces. An `__init__` makes the wrapper's func, which it replaces.
_FURTHER_METHODS = {
    "AtariEnv": ("_get_obs",),
    "FlattenObservation": ("__init__",),
    "ClipAction": ("__init__",),
    "ClipReward": ("__init__",),
    "GrayscaleObservation": ("__init__",),
}
# Methods and properties of MuJoCo envs that a twin does not call if it recognises them.
_MUJOCO_ATTRIBUTES = (
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
# Those with the same code in all classes that define them.
_SHARED_MUJOCO_ATTRIBUTES = ("control_cost", "healthy_reward", "terminated")
_RESCALING_FUNCTIONS = {"RescaleAction": "backward", "RescaleObservation": "forward"}

_MAX_DEPTH = 1000  # an env may wrap itself
_PYTHON_IS_AS_FAST = "Python is as fast"
Note = tuple[str, str]  # the name of a wrapper's class, and why it is not compiled ("": it is)


def compile_env(env: Any, always: bool = False) -> Any:
    """Compiles an env's wrappers.

    Args:
        env: The env with its wrappers, which is not changed.
        always: Whether it is compiled even if Python is as fast.

    Returns:
        An object whose ``step`` steps the env, or the env itself if nothing is compiled.
    """
    if not always and not _may_pay_off(env):
        return env  # building a chain takes milliseconds
    chain = Chain(env, _build)
    return chain if always or _pays_off(chain) else env


def _classes(env: Any) -> list[type]:
    """The classes of an env's wrappers, the outermost first, and of the innermost env."""
    classes = [type(env)]
    with contextlib.suppress(Exception):  # an env's attributes may raise
        while (env := _wrapped_env(env)) is not None and len(classes) < _MAX_DEPTH:
            classes.append(type(env))
    return classes


def _may_pay_off(env: Any) -> bool:
    *wrappers, innermost = _classes(env)
    names = {each.__name__ for each in wrappers}
    return not _FASTER_TWINS.isdisjoint(names) or any(
        each.__name__ in _ENVS for each in innermost.__mro__
    )


def _pays_off(chain: Chain) -> bool:
    return chain.steps_env or any(name in _FASTER_TWINS and not why for name, why in chain.notes)


def notes_of(stepper: Any) -> list[Note]:
    """The names of an env's wrappers, the outermost first, and why some are not compiled.

    Args:
        stepper: The result of ``compile_env``.
    """
    if isinstance(stepper, Chain):
        return list(stepper.notes)
    if not _may_pay_off(stepper):
        return [(each.__name__, _PYTHON_IS_AS_FAST) for each in _classes(stepper)[:-1]]
    return [(name, why or _PYTHON_IS_AS_FAST) for name, why in Chain(stepper, _build).notes]


def summary_of(stepper: Any) -> str:
    """How many of an env's wrappers are compiled, and why others are not; empty if it has none.

    Args:
        stepper: The result of ``compile_env``.
    """
    notes = notes_of(stepper)
    if not notes:
        return ""
    names = [name for name, _ in notes]
    places = zip([*names[1:], "the env"], names, ["the caller", *names], strict=False)
    stopped = [
        f"{name} between {inner_env} and {above}: {why}"
        for (inner_env, name, above), (_, why) in zip(places, notes, strict=True)
        if why not in ("", _PYTHON_IS_AS_FAST)
    ]
    count = sum(not why for _, why in notes)
    summary = f"{count} of {len(notes)} compiled"
    if not stopped and not count:
        summary += f" ({_PYTHON_IS_AS_FAST})"
    return "; ".join([summary, *stopped])


def _build(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    """The stepper of an env in a chain, and notes about its wrappers."""
    try:
        return _build_stepper(env, chain)
    except Exception as error:  # an env's attributes may raise
        return PythonStepper(env, chain), [(type(env).__name__, f"looking at it raises {error!r}")]


def _build_stepper(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    inner_env = _wrapped_env(env)
    if inner_env is None:
        return _build_innermost(env, chain), []
    inner, notes = _build(inner_env, chain)
    twin, why = _find_twin(env)
    notes = [(type(env).__name__, why), *notes]
    if twin is not None:
        return twin(env, chain, inner_env, inner, _called_hook(type(env))), notes
    if isinstance(inner, PythonStepper):
        return PythonStepper(env, chain, *inner.inner_env_and_chain), notes
    # The inner env gets another chain, which this wrapper's `self.env.step` calls.
    inner_chain = Chain(inner_env, _build)
    if _pays_off(inner_chain):
        return PythonStepper(env, chain, inner_env, inner_chain), notes
    return PythonStepper(env, chain), notes


def _build_innermost(env: Any, chain: Chain) -> Any:
    """The stepper of an env that wraps nothing."""
    kind = type(env)
    name = kind.__name__
    if name == "AtariEnv" and kind in classes_of(name) and not _difference(kind):
        return getattr(import_module(f"{__name__}.{TWINS[name]}"), name)(env, chain)
    code = list(code_of_env(kind))
    names = [name.split(".") for name, function in code if is_known(function, name)]
    known = frozenset(method for _, method in names)
    chain.steps_env = "step" in known and known.isdisjoint(vars(env)) and not _obstacle(kind)
    if not chain.steps_env:
        return PythonStepper(env, chain)
    name = names[0][0]  # of the class that defines the step
    return getattr(import_module(f"{__name__}.{_ENVS[name]}"), name)(env, chain, known)


def _wrapped_env(env: Any) -> Any:
    """The env in a wrapper; None if an env is not recognised as a wrapper.

    It does not read ``__dict__`` if it need not: after that, Python 3.11 and 3.12 take longer for
    each of the env's attributes, and a step of CartPole takes 6 % longer.
    """
    if _class_attribute(type(env), "env") is None:
        try:
            inner_env = object.__getattribute__(env, "env")
        except AttributeError:
            return None
    else:
        own = getattr(env, "__dict__", None)
        inner_env = own.get("env") if type(own) is dict else None
    return inner_env if isinstance(inner_env, gym.Env) else None


def _called_hook(kind: type) -> str | None:
    return next((name for name in _HOOKS if hasattr(kind, name)), None)


def _find_twin(wrapper: Any) -> tuple[type[Twin] | None, str]:
    """The twin for a wrapper, or None and the reason why there is none."""
    kind = type(wrapper)
    name = kind.__name__
    if name not in TWINS or kind not in classes_of(name):
        return _find_base_twin(wrapper)
    for attribute in vars(wrapper):
        if _class_attribute(kind, attribute) is not None:
            return None, f"its {attribute} has been replaced"
    difference = _difference(kind)
    if difference:
        return None, difference
    if not _has_class_func(wrapper):
        name = next(each.__name__ for each in kind.__mro__ if each.__name__.startswith("Transform"))
    twin: type[Twin] = getattr(import_module(f"{__name__}.{TWINS[name]}"), name)
    return twin, ""


def _find_base_twin(wrapper: Any) -> tuple[type[Twin] | None, str]:
    """The twin for a wrapper that inherits its step, or None and the reason."""
    kind = type(wrapper)
    base = next(each for each in kind.__mro__ if "step" in vars(each))
    if base not in _BASES:
        return None, "it has no twin"
    for attribute in ("env", "step", *_HOOKS):
        if attribute in vars(wrapper) and _class_attribute(kind, attribute) is not None:
            return None, f"its {attribute} has been replaced"
    if not is_known(vars(base)["step"], f"{base.__name__}.step"):
        return None, f"{base.__name__}.step is not the one that its twin is for"
    why = _obstacle(kind)
    if why:
        return None, why
    twin: type[Twin] = getattr(import_module(f"{__name__}.inherited"), base.__name__)
    return twin, ""


def classes_of(name: str) -> list[type[Any]]:
    """The classes of imported modules for which there is a twin of this name."""
    modules = (vars(sys.modules[module]) for module in SOURCE_MODULES if sys.modules.get(module))
    return [module[name] for module in modules if name in module]


def code_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and properties that the twin of a class replaces, each with its name."""
    outermost = gym.Wrapper if issubclass(kind, gym.Wrapper) else kind
    for each in kind.__mro__[: kind.__mro__.index(outermost) + 1]:
        for method in _CHECKED_ATTRIBUTES:
            if method in vars(each):
                yield f"{each.__name__}.{method}", vars(each)[method]
    name = kind.__name__
    for method in _FURTHER_METHODS.get(name, ()):
        yield f"{name}.{method}", _class_attribute(kind, method)
    if name.startswith("Normalize"):
        from gymnasium.wrappers import utils

        for method in ("update", "update_from_moments"):
            yield f"RunningMeanStd.{method}", vars(utils.RunningMeanStd)[method]
        helper = utils.update_mean_var_count_from_moments
        yield "update_mean_var_count_from_moments", helper
    elif name in _RESCALING_FUNCTIONS:
        yield "rescale_box", gym.wrappers.utils.rescale_box
    elif name == "FlattenObservation":
        yield "_flatten_box_multibinary", gym.spaces.utils.flatten.dispatch(gym.spaces.Box)
    elif name == "FrameStackObservation":
        function: Any = vars(sys.modules[kind.__module__])["concatenate"]
        if function is gym.vector.utils.concatenate:
            function = function.dispatch(gym.spaces.Box)
        yield "_concatenate_base", function


def code_of_env(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and properties that the twin of an env may replace, each with its name."""
    base = _definer(kind, "step")
    if base is not None and base.__name__ in _ENVS:
        for name in ("step", *_MUJOCO_ATTRIBUTES):
            definer = _definer(kind, name)
            if definer is not None and (definer is base or definer.__name__ == "MujocoEnv"):
                owner = "MujocoEnv" if name in _SHARED_MUJOCO_ATTRIBUTES else definer.__name__
                yield f"{owner}.{name}", vars(definer)[name]


def _difference(kind: type) -> str:
    """How a class of wrappers differs from the one with a twin; empty if it does not."""
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
        if _class_attribute(each, "__setattr__") is not vars(object)["__setattr__"]:
            return "it has a __setattr__"
        if _class_attribute(each, "__getattr__") is not None:
            return "it has a __getattr__"
    return next(filter(None, map(_obstacle, kinds)), "")


def _class_attribute(kind: type, name: str) -> Any:
    """An attribute of a class or its bases, not bound; None if there is none."""
    definer = _definer(kind, name)
    return None if definer is None else vars(definer)[name]


def _definer(kind: type, name: str) -> type | None:
    """The class that defines an attribute: a class or one of its bases."""
    return next((each for each in kind.__mro__ if name in vars(each)), None)


def _obstacle(kind: type) -> str:
    """Why a twin would miss what a class does; empty if it would not."""
    if _class_attribute(kind, "__getattribute__") is not vars(object)["__getattribute__"]:
        return "it has a __getattribute__"
    hasattr(kind, "step")  # gives the class a version
    return "" if has_version(kind) else f"changes of {kind.__name__} would not be noticed"


def _has_class_func(wrapper: Any) -> bool:
    """Whether a wrapper's func is the one that its class makes, if its twin replaces that."""
    kind = type(wrapper)
    name = kind.__name__
    if name in _RESCALING_FUNCTIONS:
        definition = gym.wrappers.utils.rescale_box
    elif "__init__" in _FURTHER_METHODS.get(name, ()):
        definition = _class_attribute(kind, "__init__")
    else:
        return True
    func = getattr(wrapper, "func", None)
    return (
        type(func) is FunctionType
        and func.__code__ in definition.__code__.co_consts
        and _RESCALING_FUNCTIONS.get(name, func.__code__.co_name) == func.__code__.co_name
        and not func.__defaults__
        and not func.__kwdefaults__
        and func.__globals__.get("np", np) is np
    )
