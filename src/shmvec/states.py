"""Gets and sets the state of an env and its wrappers, so that it continues exactly as before.

A state has a part for each layer: each wrapper, and the env inside. Gymnasium's own envs and
wrappers have states of fixed size, which become one array. An env with ``get_state()`` and
``set_state(state)`` defines its own state. All attributes of any other env are pickled.
"""

from __future__ import annotations

import io
import operator
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import wrappers

from shmvec import _pickling
from shmvec.spaces import Anything

__all__ = ["StateAccess"]

Vector = npt.NDArray[Any]


class _Part:
    """A part of a state. One of fixed size fills a slice of a vector; any other is an object.

    Attributes:
        dtype: The dtype of the slice; None if the part is an object.
        size: The length of the slice.
    """

    dtype: np.dtype[Any] | None = None
    size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the state, if it has only this part."""
        return (self.size,)

    def get(self, out: Any) -> Any:
        """Fills the slice ``out``, or returns the object."""
        raise NotImplementedError

    def set(self, value: Any) -> None:
        """Restores a slice or an object that ``get`` has made."""
        raise NotImplementedError

    def prepare_rendering(self) -> None:
        """Updates what only rendering reads; this may change the state."""


_FLOAT64 = np.dtype(np.float64)
_UINT8 = np.dtype(np.uint8)
_LARGE_STATE_BYTES = 65536  # bytes; a larger state is set from its own slices, without a copy


class StateAccess:
    """Access to the state of one env.

    Attributes:
        space: The space of states: a Box of float64, of bytes (uint8) or of the arrays that the
            env's own ``get_state`` returns; ``Anything`` if states have no fixed size.
        nothing: A placeholder for a state that nobody reads.
    """

    space: gym.Space[Any]
    nothing: Any

    def __init__(self, env: gym.Env[Any, Any], include_rng: bool) -> None:
        """Examines the layers of an env. It must have been reset before.

        Args:
            env: The env.
            include_rng: Whether the random generators of envs whose steps are random are part of
                the state.

        Raises:
            TypeError: The state of a layer cannot be taken.
        """
        parts = _parts(env, include_rng)
        fixed = [part for part in parts if part.dtype is not None]
        self._objects = [part for part in parts if part.dtype is None]
        # Floats first: only they need to be aligned.
        self._fixed = sorted(fixed, key=lambda part: part.dtype != _FLOAT64)
        self._is_single = len(parts) == 1
        dtypes = {part.dtype for part in fixed}
        if self._is_single and fixed:
            dtype, shape = fixed[0].dtype, fixed[0].shape
        elif dtypes <= {_FLOAT64}:
            dtype, shape = _FLOAT64, (sum(part.size for part in fixed),)
        else:
            dtype, shape = _UINT8, (sum(_nbytes(part) for part in fixed),)
        self._vector: Vector = np.zeros(shape, dtype)
        self._is_large = self._vector.nbytes > _LARGE_STATE_BYTES
        self._steps = [(part.get, part.set, out) for part, out in self._slices_of(self._vector)]
        self.space = Anything() if self._objects else unbounded_box(shape, dtype)
        self.nothing = None if self._objects else self._vector

    def _slices_of(self, vector: Vector) -> list[tuple[_Part, Vector]]:
        flat = vector.reshape(-1)
        raw = flat.view(np.uint8)
        slices, begin = [], 0
        for part in self._fixed:
            end = begin + _nbytes(part)
            slices.append((part, raw[begin:end].view(part.dtype or _UINT8)))
            begin = end
        return slices

    def get(self) -> Any:
        """Returns the current state. If it is an array, the next call overwrites it."""
        for get, _, out in self._steps:
            get(out)
        if not self._objects:
            return self._vector
        values = [part.get(None) for part in self._objects]
        if self._is_single:
            return values[0]
        return (self._vector.copy(), *values)

    def set(self, state: Any) -> None:
        """Restores a state that ``get`` has returned, for this env or an equal one elsewhere.

        Raises:
            TypeError: It is not a state of this kind.
            ValueError: It is the state of another env.
        """
        if self._objects:
            if self._is_single:
                self._objects[0].set(state)
                return
            state = self._set_objects(state)
        array = np.asarray(state)
        if array.shape != self._vector.shape or array.dtype != self._vector.dtype:
            raise ValueError(
                f"a state of this env is {self._vector.dtype} {self._vector.shape}, not "
                f"{array.dtype} {array.shape}"
            )
        self._put(array)

    def put(self, state: Any) -> None:
        """Restores a state that is known to fit."""
        if self._objects:
            self.set(state)
        else:
            self._put(state)

    def _put(self, array: Vector) -> None:
        if self._is_large and array.flags.c_contiguous:
            for part, out in self._slices_of(array):
                part.set(out)
            return
        self._vector[...] = array
        for _, put, out in self._steps:
            put(out)

    def rendered(self, render: Callable[[], Any]) -> Any:
        """Calls ``render`` for the current state, even if that was just set."""
        state = self.get()
        state = state.copy() if isinstance(state, np.ndarray) else state
        for part in (*self._fixed, *self._objects):
            part.prepare_rendering()
        try:
            return render()
        finally:
            self.set(state)

    def _set_objects(self, state: Any) -> Any:
        """Restores the parts that are objects; returns the array of the others."""
        if not isinstance(state, tuple) or len(state) != 1 + len(self._objects):
            raise TypeError(
                f"a state of this env is a tuple of {1 + len(self._objects)} parts, not "
                f"{type(state).__name__}"
            )
        for part, value in zip(self._objects, state[1:], strict=True):
            part.set(value)
        return state[0]


def _nbytes(part: _Part) -> int:
    assert part.dtype is not None
    return part.size * part.dtype.itemsize


def unbounded_box(shape: tuple[int, ...], dtype: Any) -> gym.spaces.Box:
    """A space of all arrays of a shape and dtype."""
    if np.dtype(dtype).kind == "f":
        return gym.spaces.Box(-np.inf, np.inf, shape, dtype)
    if np.dtype(dtype) == np.bool_:
        return gym.spaces.Box(0, 1, shape, dtype)
    bounds = np.iinfo(dtype)
    return gym.spaces.Box(bounds.min, bounds.max, shape, dtype)


# ---- layers ----------------------------------------------------------------------------------

_CHECKS = (wrappers.PassiveEnvChecker, wrappers.OrderEnforcing)  # they know that it was reset
_STATELESS = (
    wrappers.TransformAction,
    wrappers.ClipAction,
    wrappers.RescaleAction,
    wrappers.TransformReward,
    wrappers.ClipReward,
    wrappers.TransformObservation,
    wrappers.DtypeObservation,
    wrappers.FilterObservation,
    wrappers.FlattenObservation,
    wrappers.GrayscaleObservation,
    wrappers.RescaleObservation,
    wrappers.ReshapeObservation,
    wrappers.ResizeObservation,
)

_TRANSFORMS = (wrappers.TransformAction, wrappers.TransformObservation, wrappers.TransformReward)
_ATARI = "ale_py.env.AtariEnv"

# By the full name of a class, since its package may not be installed: attributes that a step reads
# or writes, and how many numbers each has at most.
_ATTRIBUTES: dict[str, dict[str, int]] = {
    "gymnasium.envs.classic_control.cartpole.CartPoleEnv": {
        "state": 4,
        "steps_beyond_terminated": 1,
    },
    "gymnasium.envs.classic_control.mountain_car.MountainCarEnv": {"state": 2},
    "gymnasium.envs.classic_control.continuous_mountain_car.Continuous_MountainCarEnv": {
        "state": 2
    },
    "gymnasium.envs.classic_control.pendulum.PendulumEnv": {"state": 2, "last_u": 1},
    "gymnasium.envs.classic_control.acrobot.AcrobotEnv": {"state": 4},
    "gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv": {"s": 1, "lastaction": 1},
    "gymnasium.envs.toy_text.cliffwalking.CliffWalkingEnv": {"s": 1, "lastaction": 1},
    "gymnasium.envs.toy_text.taxi.TaxiEnv": {
        "s": 1,
        "lastaction": 1,
        "fickle_step": 1,
        "taxi_orientation": 1,
    },
    "gymnasium.envs.toy_text.blackjack.BlackjackEnv": {"player": 32, "dealer": 32},
}
# Envs whose steps are random.
_RANDOM_ENVS = ("FrozenLakeEnv", "CliffWalkingEnv", "TaxiEnv", "BlackjackEnv")


def _class_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _parts(env: gym.Env[Any, Any], include_rng: bool) -> list[_Part]:
    """The parts of an env's state, layer by layer from the outside."""
    parts: list[_Part] = []
    unknown_layers: list[Any] = []
    is_foreign = False  # a wrapper is not Gymnasium's: it may read and change the layers inside
    inner_layers: list[Any] = []  # layers of known classes inside such a wrapper
    has_transforms = False  # whether there are functions of the user, which may draw random numbers
    layer: Any = env
    while True:
        name = _class_name(layer)
        if _defines_state(layer):
            parts.append(_defined_part(layer))
            break
        if type(layer) in _STATELESS:
            has_transforms |= type(layer) in _TRANSFORMS
        elif type(layer) in _CHECKS:
            pass
        elif type(layer) is wrappers.TimeLimit:
            parts.append(_ElapsedSteps(layer))
        elif name in _ATTRIBUTES:
            parts.append(_Attributes(layer, _ATTRIBUTES[name]))
        elif name.startswith("gymnasium.wrappers.atari_preprocessing."):
            parts.append(_AtariPreprocessing(layer))
        elif type(layer) is wrappers.FrameStackObservation and _stacks_arrays(layer):
            parts.append(_Frames(layer))
        elif _is_atari(layer):
            parts.append(_Ale(layer, include_rng))
            if name != _ATARI:  # a subclass may have more
                unknown_layers.append(layer)
        elif _is_mujoco(layer):
            is_subclass = not _is_gymnasiums_mujoco(layer)
            parts.append(_Mujoco(layer, is_foreign or is_subclass))
            if is_subclass:  # it may have more
                unknown_layers.append(layer)
        else:
            unknown_layers.append(layer)
            is_foreign |= not name.startswith("gymnasium.")
        if is_foreign and layer not in unknown_layers and type(layer) not in _CHECKS:
            inner_layers.append(layer)
        if not isinstance(layer, gym.Wrapper):
            # All wrappers use the generator of the env inside.
            is_random = has_transforms or len(unknown_layers) > 0 or _is_random(layer)
            if include_rng and layer not in unknown_layers and is_random:
                parts.append(_Generator(layer))
            break
        layer = layer.env
    if unknown_layers:
        parts.append(_Pickled(env, unknown_layers, include_rng))
    if inner_layers:
        parts.append(_Parameters(inner_layers))
    return parts


def _is_random(layer: Any) -> bool:
    """Whether steps of an env of a known class draw random numbers."""
    return (
        type(layer).__name__ in _RANDOM_ENVS
        or getattr(layer, "torque_noise_max", 0) > 0  # Acrobot
        or isinstance(getattr(layer, "_frameskip", None), tuple)  # AtariEnv
    )


def _defines_state(layer: Any) -> bool:
    return all(callable(getattr(layer, name, None)) for name in ("get_state", "set_state"))


def _is_gymnasiums_mujoco(layer: Any) -> bool:
    return type(layer).__module__.startswith("gymnasium.envs.mujoco.")


def _is_mujoco(layer: Any) -> bool:
    if not any(kind.__module__.startswith("gymnasium.envs.mujoco.") for kind in type(layer).mro()):
        return False
    import mujoco

    return isinstance(getattr(layer, "data", None), mujoco.MjData)


def _is_atari(layer: Any) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == _ATARI for kind in type(layer).mro())


def _stacks_arrays(layer: Any) -> bool:
    return isinstance(layer.env.observation_space, gym.spaces.Box)


# ---- parts -----------------------------------------------------------------------------------


class _ElapsedSteps(_Part):
    dtype = _FLOAT64
    size = 1

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def get(self, out: Vector) -> None:
        out[0] = self._layer._elapsed_steps

    def set(self, value: Vector) -> None:
        self._layer._elapsed_steps = int(value[0])


class _Attributes(_Part):
    """Attributes of a layer: None, numbers, and short rows of them. Their types are kept."""

    # The types, with the dtype's character for arrays, and how each is made from a list of floats.
    _TYPES: Sequence[tuple[type, str, Callable[[list[float]], Any]]] = (
        (type(None), "", lambda values: None),
        (bool, "", lambda values: bool(values[0])),
        (int, "", lambda values: int(values[0])),
        (float, "", lambda values: values[0]),
        (np.float64, "", lambda values: np.float64(values[0])),
        (np.float32, "", lambda values: np.float32(values[0])),
        (np.int64, "", lambda values: np.int64(values[0])),
        (np.bool_, "", lambda values: np.bool_(values[0])),
        (tuple, "", tuple),
        (list, "", lambda values: [int(value) for value in values]),
        (np.ndarray, "d", lambda values: np.array(values)),
        (np.ndarray, "f", lambda values: np.array(values, np.float32)),
    )
    _CODES = {(kind, dtype): code for code, (kind, dtype, _) in enumerate(_TYPES)}

    dtype = _FLOAT64

    def __init__(self, layer: Any, sizes: dict[str, int]) -> None:
        """Makes the part of a layer; ``sizes``: how many numbers each attribute has at most."""
        self._layer = layer
        self._sizes = sizes
        self.size = sum(2 + size for size in sizes.values())  # with a type code and a length

    def get(self, out: Vector) -> None:
        """Writes each attribute's type code, number of values, and values."""
        numbers: list[Any] = []
        for name, size in self._sizes.items():
            value: Any = getattr(self._layer, name, None)  # other versions of an env may lack it
            kind = type(value)
            if kind is np.ndarray:
                code, values = self._CODES.get((kind, value.dtype.char)), value.tolist()
            else:
                code = self._CODES.get((kind, ""))
                values = value if kind in (tuple, list) else () if value is None else (value,)
            padding = size - len(values)
            if code is None or padding < 0:
                raise TypeError(
                    f"the state of {type(self._layer).__name__} cannot be taken: its {name} is "
                    f"{value!r}"
                )
            numbers += (code, len(values), *values)
            numbers += [0] * padding  # so that equal states are equal arrays
        out[:] = numbers

    def set(self, value: Vector) -> None:
        begin = 0
        numbers = value.tolist()
        for name, size in self._sizes.items():
            code, count = int(numbers[begin]), int(numbers[begin + 1])
            if not 0 <= code < len(self._TYPES) or not 0 <= count <= size:
                raise ValueError(f"this is no state of a {type(self._layer).__name__}")
            values = numbers[begin + 2 : begin + 2 + count]
            setattr(self._layer, name, self._TYPES[code][2](values))
            begin += 2 + size


class _Parameters(_Part):
    """Numbers, texts and arrays of numbers of layers, which a wrapper may have changed."""

    _TYPES = (bool, int, float, str, np.ndarray)

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    def get(self, out: Any) -> list[dict[str, Any]]:
        return [self._copy_parameters(vars(layer)) for layer in self._layers]

    def set(self, value: list[dict[str, Any]]) -> None:
        for layer, parameters in zip(self._layers, value, strict=True):
            vars(layer).update(self._copy_parameters(parameters))

    def _copy_parameters(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.copy() if type(value) is np.ndarray else value
            for name, value in attributes.items()
            if type(value) in self._TYPES or isinstance(value, np.generic)
        }


class _Generator(_Part):
    """The random generator of an env: eight words of its state, and its buffered half of a draw."""

    dtype = _FLOAT64
    size = 10

    def __init__(self, layer: Any) -> None:
        self._env = layer
        if type(layer.np_random.bit_generator) is not np.random.PCG64:
            raise TypeError(
                f"the state of {type(layer).__name__} cannot be taken: its np_random is no PCG64"
            )

    def get(self, out: Vector) -> None:
        # Words of 32 bits, which floats hold exactly.
        state = self._env.np_random.bit_generator.state
        for i, key in enumerate(("state", "inc")):
            number = state["state"][key]
            out[4 * i : 4 * i + 4] = [number >> 32 * word & 0xFFFFFFFF for word in range(4)]
        out[8], out[9] = state["has_uint32"], state["uinteger"]

    def set(self, value: Vector) -> None:
        words = [int(word) for word in value]
        numbers = [
            sum(word << 32 * place for place, word in enumerate(words[begin : begin + 4]))
            for begin in (0, 4)
        ]
        self._env.np_random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": numbers[0], "inc": numbers[1]},
            "has_uint32": words[8],
            "uinteger": words[9],
        }


# Gymnasium's envs whose steps read only joints of the step before.
_JOINTS_ONLY = (
    "HalfCheetahEnv",
    "HopperEnv",
    "InvertedPendulumEnv",
    "SwimmerEnv",
    "Walker2dEnv",
)


class _Mujoco(_Part):
    """The integration state of a MuJoCo simulation, and numbers that the next step reads.

    MuJoCo leaves the Cartesian positions one substep behind the joints, and Ant and Humanoid
    measure their speed from them. So these positions are part of the state. Classes that Gymnasium
    does not have may read anything before they simulate, and draw any parameter. For them, all
    numbers that MuJoCo derives and all parameters of the physics are part of the state.
    """

    dtype = _FLOAT64

    def __init__(self, layer: Any, is_foreign: bool) -> None:
        """Makes the part of a layer; ``is_foreign``: it or a wrapper is not Gymnasium's."""
        import mujoco

        self._model, self._data = layer.model, layer.data
        self._kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._get, self._set = mujoco.mj_getState, mujoco.mj_setState
        self._forward = mujoco.mj_forward
        joint_size = mujoco.mj_stateSize(self._model, self._kind)
        self._derived: list[Vector] = []  # views: MuJoCo's memory stays where it is
        self._parameters: list[Vector] = []
        self._options: list[str] = []
        if is_foreign:
            # Sizes are those of new data, which have no contacts: these arrays have no fixed size.
            self._derived = list(_float_arrays(self._data, mujoco.MjData(self._model)))
            self._parameters = [*_float_arrays(self._model), *_float_arrays(self._model.opt)]
            options = {name: getattr(self._model.opt, name) for name in dir(self._model.opt)}
            self._options = [name for name, value in options.items() if type(value) is float]
        elif not (_is_gymnasiums_mujoco(layer) and type(layer).__name__ in _JOINTS_ONLY):
            self._derived = [self._data.xpos.reshape(-1), self._data.xipos.reshape(-1)]
        self._current: Vector = np.zeros(sum(map(len, self._parameters)))
        sizes = [joint_size, sum(map(len, self._derived)), len(self._current)]
        self._ends = np.cumsum(sizes).tolist()
        self.size = self._ends[-1] + len(self._options)
        # The last state and its slices are kept, since it is nearly always the same array.
        self._last_state: Vector | None = None
        self._slices: list[Vector] = []  # of joints, derived numbers, parameters, options
        self._derived_pairs: list[tuple[Vector, Vector]] = []

    def _slices_of(self, state: Vector) -> list[Vector]:
        if state is not self._last_state:
            self._last_state, self._slices = state, np.split(state, self._ends)
            self._derived_pairs = list(_slices_with_arrays(self._derived, self._slices[1]))
        return self._slices

    def get(self, out: Vector) -> None:
        joints, derived, parameters, options = self._slices_of(out)
        self._get(self._model, self._data, joints, self._kind)
        if self._derived:
            np.concatenate(self._derived, out=derived)
        if self._parameters:
            np.concatenate(self._parameters, out=parameters)
            options[:] = [getattr(self._model.opt, name) for name in self._options]

    def set(self, value: Vector) -> None:
        joints, _, parameters, options = self._slices_of(value)
        self._set(self._model, self._data, joints, self._kind)
        for values, array in self._derived_pairs:
            array[:] = values
        if self._parameters:
            np.concatenate(self._parameters, out=self._current)
            if not np.array_equal(self._current, parameters):  # they rarely change
                for values, array in _slices_with_arrays(self._parameters, parameters):
                    array[:] = values
            for name, number in zip(self._options, options.tolist(), strict=True):
                setattr(self._model.opt, name, number)

    def prepare_rendering(self) -> None:
        self._forward(self._model, self._data)  # moves the geometries to where the joints are


def _float_arrays(struct: Any, sizes: Any = None) -> Iterator[Vector]:
    """The arrays of floats of one of MuJoCo's structs, except those that are empty in ``sizes``.

    Arrays of bounding volumes are left out: they follow from the shapes, and may be large.
    """
    for name in dir(struct):
        size = getattr(struct if sizes is None else sizes, name)
        is_array = isinstance(size, np.ndarray) and size.dtype == _FLOAT64 and size.size > 0
        if is_array and not name.startswith(("bvh_", "oct_")):
            array, second = getattr(struct, name), getattr(struct, name)
            if array.ctypes.data == second.ctypes.data:  # not if each read computes an array
                yield array.reshape(-1)


def _slices_with_arrays(arrays: list[Vector], vector: Vector) -> Iterator[tuple[Vector, Vector]]:
    """Slices of a vector, each with its array."""
    begin = 0
    for array in arrays:
        yield vector[begin : begin + len(array)], array
        begin += len(array)


class _Ale(_Part):
    """The state of an Atari emulator, as it serialises it, with or without its random generator.

    It lacks the emulator's last action, which sticky actions (``repeat_action_probability``) may
    repeat.

    Up to ale-py 0.12.1 it also lacks whether the emulator is in the middle of a frame, where a
    reset of Qbert and Tetris leaves it, and sometimes a step of TicTacToe3D. But the state has
    whether the processor has stopped at a frame's end. So ``set`` first brings the emulator to the
    middle or the end of a frame, as the state needs it.
    """

    dtype = _UINT8
    _LENGTH = 8  # bytes for the length of the serialised state, which varies
    _REGISTERS = 52  # bytes of the processor before its status: six words, seven flags
    _MOST_FRAMES = 1000  # a game never computes for longer

    def __init__(self, layer: Any, include_rng: bool) -> None:
        self._ale = layer.ale
        self._include_rng = include_rng
        # The size must be the same in every process, while the lengths of numbers, as text, vary.
        longest = re.sub(rb"(?<= )\d+(?= )", b"0" * 10, self._serialise())
        self.size = self._LENGTH + (len(longest) * 17 // 16 + 511) // 512 * 512
        self._last_position: tuple[tuple[int, int], bool] = ((0, 0), False)  # frames; is mid-frame

    def _serialise(self) -> bytes:
        state = self._ale.cloneState(include_rng=self._include_rng).__getstate__()
        return bytes(state[0] if isinstance(state, tuple) else state)  # a tuple by ale-py 0.10

    def get(self, out: Vector) -> None:
        serialised = self._serialise()
        self._last_position = self._position(), self._is_in_frame(serialised)
        end = self._LENGTH + len(serialised)
        if end > self.size:
            raise RuntimeError(
                f"the emulator's state has grown to {len(serialised)} bytes; at most "
                f"{self.size - self._LENGTH} were expected"
            )
        out[: self._LENGTH].view(np.int64)[0] = len(serialised)
        out[self._LENGTH : end] = np.frombuffer(serialised, np.uint8)
        out[end:] = 0

    def set(self, value: Vector) -> None:
        from ale_py import ALEState

        length = int(value[: self._LENGTH].view(np.int64)[0])
        if not 0 < length <= self.size - self._LENGTH:
            raise ValueError("this is no state of an AtariEnv")
        serialised = value[self._LENGTH : self._LENGTH + length].tobytes()
        target_in_frame = self._is_in_frame(serialised)
        position = self._position()
        in_frame = self._last_position[1]
        if position != self._last_position[0] or position[1] == 0:  # it was stepped or reset
            in_frame = self._is_in_frame(self._serialise())
        if target_in_frame and not in_frame:
            self._stop_in_frame(serialised)
        elif in_frame and not target_in_frame:
            self._finish_frame()
        self._ale.restoreState(ALEState(serialised))
        self._last_position = self._position(), target_in_frame

    def _position(self) -> tuple[int, int]:
        return self._ale.getFrameNumber(), self._ale.getEpisodeFrameNumber()

    def _registers(self, serialised: bytes) -> int:
        """Where the processor's registers begin: after its name, whose length comes before it."""
        name = serialised.index(b"M6502")
        return name + serialised[name - 4]

    def _is_in_frame(self, serialised: bytes) -> bool:
        """Whether a state was taken in the middle of a frame."""
        if b"M6502" not in serialised:  # a state of another version
            return False
        return not serialised[self._registers(serialised) + self._REGISTERS] & 1

    def _stop_in_frame(self, serialised: bytes) -> None:
        """Lets the processor run an endless loop in RAM until the emulator stops it."""
        from ale_py import ALEState

        counter = self._registers(serialised) + 20
        loop = serialised[:counter] + b"\x80\0\0\0" + serialised[counter + 4 :]
        self._ale.restoreState(ALEState(loop))
        for address, code in enumerate(b"\x4c\x80\0"):  # JMP $0080
            self._ale.setRAM(address, code)
        self._ale.act(0)

    def _finish_frame(self) -> None:
        for _ in range(self._MOST_FRAMES):
            self._ale.act(0)
            if not self._is_in_frame(self._serialise()):
                break


class _AtariPreprocessing(_Part):
    """The last two frames, which the next step may read, the lives, and whether the game ended."""

    dtype = _UINT8

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._frame = layer.obs_buffer[0].size
        self.size = 2 * self._frame + 8

    def get(self, out: Vector) -> None:
        for i, frame in enumerate(self._layer.obs_buffer):
            out[i * self._frame : (i + 1) * self._frame] = frame.reshape(-1)
        out[-8:] = 0
        out[-8:-4].view(np.int32)[0] = self._layer.lives
        out[-4] = self._layer.game_over

    def set(self, value: Vector) -> None:
        for i, frame in enumerate(self._layer.obs_buffer):
            frame.reshape(-1)[:] = value[i * self._frame : (i + 1) * self._frame]
        self._layer.lives = int(value[-8:-4].view(np.int32)[0])
        self._layer.game_over = bool(value[-4])


class _Frames(_Part):
    dtype = _UINT8

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        first = np.asarray(layer.obs_queue[0])
        self._dtype, self._frame_shape, self._frame = first.dtype, first.shape, first.nbytes
        used = len(layer.obs_queue) * self._frame
        self.size = (used + 7) // 8 * 8

    def get(self, out: Vector) -> None:
        for i, frame in enumerate(self._layer.obs_queue):
            out[i * self._frame : (i + 1) * self._frame].view(self._dtype)[:] = np.ravel(frame)

    def set(self, value: Vector) -> None:
        queue = self._layer.obs_queue
        for i in range(len(queue)):
            frame = value[i * self._frame : (i + 1) * self._frame].view(self._dtype)
            queue[i] = frame.reshape(self._frame_shape).copy()


def _defined_part(layer: Any) -> _Part:
    """Makes the part of an env that defines its state by ``get_state`` and ``set_state``."""
    state = layer.get_state()
    fixed = isinstance(state, np.ndarray) and state.dtype.kind in "fiub" and state.size > 0
    return _DefinedArray(layer, state) if fixed else _DefinedObject(layer)


class _DefinedArray(_Part):
    """The state of an env whose ``get_state`` returns arrays of one shape and dtype."""

    shape: tuple[int, ...] = ()

    def __init__(self, layer: Any, first: Vector) -> None:
        """Makes the part of a layer, for arrays like its first state."""
        self._layer = layer
        self.dtype = first.dtype
        self.size = first.size
        self.shape = first.shape

    def get(self, out: Vector) -> None:
        state = np.asarray(self._layer.get_state())
        if state.shape != self.shape or state.dtype != self.dtype:
            raise RuntimeError(
                f"get_state() of {type(self._layer).__name__} has returned {state.dtype} "
                f"{state.shape}, and before {self.dtype} {self.shape}: states of changing size "
                "must not be arrays; return bytes, or a tuple of arrays"
            )
        out[:] = state.reshape(-1)

    def set(self, value: Vector) -> None:
        self._layer.set_state(value.reshape(self.shape).copy())  # the env may keep it


class _DefinedObject(_Part):
    """The state of an env whose ``get_state`` returns no such arrays."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def get(self, out: Any) -> Any:
        return self._layer.get_state()

    def set(self, value: Any) -> None:
        self._layer.set_state(value)


class _Pickled(_Part):
    """All attributes of layers of unknown classes, in one pickle.

    Layers themselves, spaces that were not sampled, specs, windows, and simulations that have a
    part of their own are not pickled: the pickle refers to them, and the restored env has its own.
    """

    _EXCLUDED_NAMES: tuple[str, ...] = ("spec", "_cached_spec", "mujoco_renderer")
    _EXCLUDED_MODULES = ("pygame", "glfw")

    def __init__(self, env: gym.Env[Any, Any], layers: list[Any], include_rng: bool) -> None:
        """Makes the part of ``layers``, which are some of the layers of ``env``."""
        self._layers = layers
        self._include_rng = include_rng
        if not include_rng:
            self._EXCLUDED_NAMES = (*self._EXCLUDED_NAMES, "_np_random")
        self._all_layers: list[Any] = [env]
        while isinstance(self._all_layers[-1], gym.Wrapper):
            self._all_layers.append(self._all_layers[-1].env)

    def _is_excluded(self, layer: Any, name: str, value: Any) -> bool:
        module = type(value).__module__.partition(".")[0]
        if isinstance(value, gym.Space):
            return not (self._include_rng and _was_sampled(value))
        return (
            name in self._EXCLUDED_NAMES
            or module in self._EXCLUDED_MODULES
            or (module == "mujoco" and _is_mujoco(layer))
            or (module == "ale_py" and _is_atari(layer))
        )

    def get(self, out: Any) -> bytes:
        own: dict[int, Any] = {id(layer): i for i, layer in enumerate(self._all_layers)}
        for i, layer in enumerate(self._layers):
            for name, value in _attributes(layer).items():
                if self._is_excluded(layer, name, value):
                    own.setdefault(id(value), (i, name))
        file = io.BytesIO()

        class Pickler(_pickling.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return own.get(id(value)) if value is not None else None

            def reducer_override(self, value: Any) -> Any:
                # If a class of a script were pickled by value, another worker would get a copy.
                if isinstance(value, type) and _is_of_script(value):
                    return NotImplemented
                return super().reducer_override(value)

        try:
            Pickler(file).dump([_attributes(layer) for layer in self._layers])
        except Exception as error:
            raise TypeError(
                f"the state of {' and '.join(map(_class_name, self._layers))} cannot be taken: "
                f"{error}. Give the env get_state() and set_state(state)."
            ) from error
        return file.getvalue()

    def set(self, value: bytes) -> None:
        if not isinstance(value, bytes):
            raise TypeError(f"a state of this env is bytes, not {type(value).__name__}")
        outer = self

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, key: Any) -> Any:
                if isinstance(key, int):
                    return outer._all_layers[key]
                return _attributes(outer._layers[key[0]]).get(key[1])

            def find_class(self, module: str, name: str) -> Any:
                first, _, rest = name.partition(".")
                # In a spawned worker, `__main__` lacks the script's classes.
                for layer in outer._all_layers if module == "__main__" else ():
                    outer_class = getattr(type(layer).step, "__globals__", {}).get(first)
                    if isinstance(outer_class, type):
                        return operator.attrgetter(rest)(outer_class) if rest else outer_class
                return super().find_class(module, name)

        layer_attributes = Unpickler(io.BytesIO(value)).load()
        for layer, attributes in zip(self._layers, layer_attributes, strict=True):
            for name in _slots(layer):
                if name not in attributes and hasattr(layer, name):
                    object.__delattr__(layer, name)
                elif name in attributes:
                    object.__setattr__(layer, name, attributes.pop(name))
            vars(layer).clear()
            vars(layer).update(attributes)


def _is_of_script(kind: type) -> bool:
    """Whether a class is in the main module, under its own name."""
    if kind.__module__ != "__main__":
        return False
    try:
        return operator.attrgetter(kind.__qualname__)(sys.modules["__main__"]) is kind
    except AttributeError:
        return False


def _slots(layer: Any) -> list[str]:
    names = []
    for kind in type(layer).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _attributes(layer: Any) -> dict[str, Any]:
    """All attributes of a layer, without those of its classes."""
    slots = {name: getattr(layer, name) for name in _slots(layer) if hasattr(layer, name)}
    return {**vars(layer), **slots}


def _was_sampled(space: gym.Space[Any]) -> bool:
    """Whether a space, or a part of it, has made its random generator."""
    parts: Any = getattr(space, "spaces", ())
    parts = parts.values() if isinstance(parts, dict) else parts
    return space._np_random is not None or any(map(_was_sampled, parts))
