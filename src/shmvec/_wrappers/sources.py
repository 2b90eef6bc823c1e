"""Recognises the code that has twins, by hashes of its source.

A function is recognised if the source in its file has a hash of ``KNOWN``, and compiles to the
function's own code. So a method that was replaced, code without a source, and a file that was
changed after its import are not recognised. ``tests/upstream/sources.py`` prints the rows that are
missing for what is installed.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np

__all__ = ["KNOWN", "fingerprint", "is_known"]

# name: {hash: versions}. A method is named Class.method, by the class that defines it.
KNOWN: dict[str, dict[str, str]] = {
    "ActionWrapper.action": {"7e1a0123e1f7b4e6": "1.0 to 1.4"},
    "ActionWrapper.step": {"267b3d232fa4f360": "1.0 to 1.4"},
    "AntEnv._get_obs": {"adc21bb6dcf0680f": "1.0 to 1.4, v4", "b9b6003192185a80": "1.0 to 1.4, v5"},
    "AntEnv._get_rew": {"f378a93e653ab487": "1.0 to 1.4, v5"},
    "AntEnv.contact_cost": {"27dcc0cfe264e19d": "1.0 to 1.4"},
    "AntEnv.contact_forces": {"7e8e2442a1830132": "1.0 to 1.4"},
    "AntEnv.is_healthy": {"72e9385a5f1647e3": "1.0 to 1.4"},
    "AntEnv.step": {"3588bb63bc9cc848": "1.0 to 1.4, v4", "38918e703329cb6a": "1.0 to 1.4, v5"},
    "AtariEnv._get_obs": {
        "6cf72ff1e473e0c5": "ale-py 0.10.1",
        "eda3c990829de254": "ale-py 0.10.2 to 0.12",
    },
    "AtariEnv.step": {
        "3fa21d197d7a07a1": "ale-py 0.10.1 to 0.11.0",
        "1c465a613ae7a516": "ale-py 0.11.1 and 0.11.2",
        "407e5460a2a42e43": "ale-py 0.12",
    },
    "AtariPreprocessing.step": {"aeefc7337e060784": "1.0 to 1.4"},
    "Autoreset.step": {"ee4918cba203e5e4": "1.0 to 1.4"},
    "ClipAction.__init__": {"f4d92b1624057463": "1.0 to 1.3", "ea790539e76ee69b": "1.4"},
    "ClipReward.__init__": {"70541cc04e78a4c2": "1.0 to 1.3", "96e60789ad9ba0b7": "1.4"},
    "EpisodicLifeEnv.step": {
        "5d3eb63bfe89e686": "Stable-Baselines3 2.3 to 2.9",
        "dd7bcd2f6688dcbf": "CleanRL",
    },
    "FlattenObservation.__init__": {"6d0978055bbec239": "1.0 to 1.4"},
    "FrameStackObservation.step": {"dcea161911034268": "1.0 to 1.4"},
    "GrayscaleObservation.__init__": {"6a9ad63cd06c823e": "1.0 to 1.3", "7c239b774e4fe032": "1.4"},
    "HalfCheetahEnv._get_obs": {
        "deb6c3c8f0868369": "1.0 to 1.4, v4",
        "8df76e60f9c351a0": "1.0 to 1.4, v5",
    },
    "HalfCheetahEnv._get_rew": {"2ee72bf4e29530de": "1.0 to 1.4, v5"},
    "HalfCheetahEnv.step": {
        "59012ec1d66193a1": "1.0 to 1.4, v4",
        "94bc6d132326568a": "1.0 to 1.4, v5",
    },
    "HopperEnv._get_obs": {
        "defce3d5222896b5": "1.0 to 1.4, v4",
        "9ad2d8834274d6ba": "1.0 to 1.4, v5",
    },
    "HopperEnv._get_rew": {"43ef3f3febfa445e": "1.0 to 1.4, v5"},
    "HopperEnv.is_healthy": {"f01da3f5958aa409": "1.0 to 1.4"},
    "HopperEnv.step": {"7b8a5f400d7a0cab": "1.0 to 1.4, v4", "ada24861bd105089": "1.0 to 1.4, v5"},
    "MaxAndSkipEnv.step": {
        "47ca11d6392d6915": "Stable-Baselines3 2.3 to 2.9",
        "e74222d8542b504d": "CleanRL",
    },
    "MaxAndSkipObservation.step": {"5a10b61013cf5b5a": "1.0 to 1.4"},
    "Monitor.step": {
        "c34191ee71ef732c": "Stable-Baselines3 2.3 and 2.4",
        "8ba4a2409c56f3b6": "Stable-Baselines3 2.5 to 2.9",
    },
    "MujocoEnv._step_mujoco_simulation": {"2a032297678cc774": "1.0 to 1.4"},
    "MujocoEnv.control_cost": {"270337bda617bf0f": "1.0 to 1.4"},
    "MujocoEnv.do_simulation": {"15421889b2cd0a33": "1.0 to 1.4"},
    "MujocoEnv.dt": {"2fc9a4d48f0a6ee5": "1.0 to 1.4"},
    "MujocoEnv.healthy_reward": {
        "6c523227b6140408": "1.0 to 1.4, v4",
        "d6f30fc53b2ab49c": "1.0 to 1.4, v5",
    },
    "MujocoEnv.state_vector": {"2c8a8ebedcbe0bb4": "1.0 to 1.4"},
    "MujocoEnv.terminated": {"ac7f5e5f4034b762": "1.0 to 1.4, v4"},
    "NormalizeObservation.observation": {"187a253ea015f2e4": "1.0 to 1.4"},
    "NormalizeReward.step": {"2ccd784bbf74713d": "1.0 to 1.4"},
    "ObservationWrapper.observation": {"e65d31e8b3955e43": "1.0 to 1.4"},
    "ObservationWrapper.step": {"938db7f0b6f342cf": "1.0 to 1.4"},
    "OrderEnforcing.step": {"37612be020e6e40a": "1.0 to 1.4"},
    "PassiveEnvChecker.step": {"5d7404d8a38b0d91": "1.0 to 1.3", "3eab46a188b9c844": "1.4"},
    "RecordEpisodeStatistics.step": {"87a579a75b125568": "1.0 to 1.4"},
    "RewardWrapper.reward": {"b5267101a2433e1b": "1.0 to 1.4"},
    "RewardWrapper.step": {"05f490f537e99dd0": "1.0 to 1.4"},
    "RunningMeanStd.update": {"4a8afc7f230b5c78": "1.0 to 1.4"},
    "RunningMeanStd.update_from_moments": {"2b44be3c1214f650": "1.0 to 1.4"},
    "StickyActionEnv.step": {
        "e9bf154576fa44f0": "Stable-Baselines3 2.3 to 2.9",
        "5064e8956103e65d": "CleanRL",
    },
    "SwimmerEnv._get_obs": {
        "17028a823b58c658": "1.0 to 1.4, v4",
        "b6db887a4b719b39": "1.0 to 1.4, v5",
    },
    "SwimmerEnv._get_rew": {"2768604be696e088": "1.0 to 1.4, v5"},
    "SwimmerEnv.step": {
        "c98716f6e0b6880b": "1.0 to 1.4, v4",
        "117ad1765f00f442": "1.0 to 1.4, v5",
    },
    "TimeAwareObservation.observation": {"224b9907b1071fdf": "1.0 to 1.4"},
    "TimeAwareObservation.step": {"fff84ecb5075c895": "1.0 to 1.4"},
    "TimeLimit.step": {"4ee4723aecbd4517": "1.0 to 1.4"},
    "TransformAction.action": {"e6476daa7626e366": "1.0 to 1.4"},
    "TransformObservation.observation": {"04e09509b1d13df2": "1.0 to 1.4"},
    "TransformReward.reward": {"673336c0efb6190d": "1.0 to 1.4"},
    "Walker2dEnv._get_obs": {
        "defce3d5222896b5": "1.0 to 1.4, v4",
        "9ad2d8834274d6ba": "1.0 to 1.4, v5",
    },
    "Walker2dEnv._get_rew": {"2dd5acc5ed573ea0": "1.0 to 1.4, v5"},
    "Walker2dEnv.is_healthy": {"7bce25dd45af32b7": "1.0 to 1.4"},
    "Walker2dEnv.step": {
        "7b8a5f400d7a0cab": "1.0 to 1.4, v4",
        "ada24861bd105089": "1.0 to 1.4, v5",
    },
    "Wrapper.action_space": {"686f68faa272b625": "1.0 to 1.4"},
    "Wrapper.observation_space": {"943faf7d41eb4b72": "1.0 to 1.4"},
    "Wrapper.step": {"d13cef66740c7c38": "1.0 to 1.4"},
    "_concatenate_base": {"e0f84bb7c4f567d7": "1.0 to 1.3", "e406494b29f1e2cf": "1.4"},
    "_flatten_box_multibinary": {"015393fa52751856": "1.0 to 1.4"},
    "rescale_box": {
        "2e15fe039f1b12e3": "1.0 to 1.2",
        "e2f1e427cd5531c5": "1.3",
        "8b0e3148e305ae80": "1.4",
    },
    "update_mean_var_count_from_moments": {"bf579c4ed35fa99b": "1.0 to 1.4"},
}


def is_known(function: Any, name: str) -> bool:
    """Whether a function is one that twins replace.

    Args:
        function: A function, or a property, whose getter is checked.
        name: Its name in ``KNOWN``.
    """
    if type(function) is property:
        function = function.fget
    return (
        type(function) is FunctionType
        and fingerprint(function) in KNOWN.get(name, ())
        and function.__globals__.get("np", np) is np
    )


def fingerprint(function: FunctionType) -> str:
    """A hash of a function's source and defaults; empty if the source is not what runs."""
    names = function.__globals__
    imported = [
        each
        for each in function.__code__.co_names
        if each in names and getattr(names[each], "__module__", None) != names.get("__name__")
    ]
    code = function.__code__
    source = _source(code, code.co_filename, function.__qualname__, ",".join(imported))
    if not source:
        return ""
    text = f"{source}{function.__defaults__}{function.__kwdefaults__}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _source(code: CodeType, file: str, name: str, imported: str) -> str:
    """The source of a function, with its indentation; empty if it compiles to another code.

    Args:
        code: The function's code.
        file: The file of its source; part of the cache's key, since codes of two files may be
            equal.
        name: Its qualified name.
        imported: Names that its module has imported; Python calls their methods by other opcodes.
    """
    lines = linecache.getlines(file)[code.co_firstlineno - 1 :]
    source = "".join(_block(lines))
    *_, owner, _ = ["", *name.split(".")]
    # Compiled at the same lines as in the file, since equal codes have equal lines.
    head = f"import {imported}" if imported else ""
    head += "\n" * (code.co_firstlineno - 2) + (f"class {owner}:\n" if owner else "\n")
    flags = code.co_flags & annotations.compiler_flag
    try:
        compiled = compile(head + source, file, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return ""
    return source if code in _codes(compiled) else ""


def _block(lines: list[str]) -> Iterator[str]:
    """The lines of the definition that begins at the first line, without blank ones at its end."""
    blank: list[str] = []
    inside = False  # the body, or arguments on lines of their own
    for line in lines:
        text = line.lstrip()
        if not text:
            blank.append(line)
            continue
        deeper = len(line) - len(text) - (len(lines[0]) - len(lines[0].lstrip()))
        if deeper < 0 or (deeper == 0 and inside and text[0] != ")"):
            return
        inside = inside or deeper > 0
        yield from blank
        yield line
        blank = []


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The codes in a code, at any depth."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
