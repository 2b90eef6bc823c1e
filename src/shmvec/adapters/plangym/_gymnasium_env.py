"""``GymnasiumEnv``: any Gymnasium env with plangym's interface, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.wrappers import TimeLimit

from shmvec.adapters._shared import delegate, register_as
from shmvec.planning.batches import checked_dt
from shmvec.planning.rows import SharedEnv

_GREY_WEIGHTS = np.array([19595, 38470, 7471])  # of ITU-R 601, in 1/65536, as in Pillow


class GymnasiumEnv:
    """A Gymnasium env with plangym's interface, where plangym has no class for it.

    Its states are those of ``shmvec.planning.PlanningVectorEnv``. The constructor's arguments
    ``name``, ``frameskip``, ``autoreset``, ``delay_setup``, ``remove_time_limit``, ``obs_type`` and
    ``return_image`` are attributes, too.
    """

    OBS_IS_ARRAY = True
    SINGLETON = False
    AVAILABLE_RENDER_MODES = frozenset({"human", "rgb_array", None})
    AVAILABLE_OBS_TYPES = frozenset({"coords", "rgb", "grayscale"})
    DEFAULT_OBS_TYPE = "coords"

    def __init__(
        self,
        name: str,
        frameskip: int = 1,
        autoreset: bool = True,
        wrappers: Iterable[Any] | None = None,
        delay_setup: bool = False,
        remove_time_limit: bool = True,
        render_mode: str | None = "rgb_array",
        obs_type: str | None = None,
        return_image: bool = False,
        env_fn: Callable[[], gym.Env[Any, Any]] | None = None,
        include_rng: bool = True,
        **kwargs: Any,
    ) -> None:
        """Builds the env.

        Args:
            name: The env's id; with ``env_fn`` just a name.
            frameskip: How often each step is repeated with the same action.
            autoreset: Whether the step that ends an episode resets the env afterwards.
            wrappers: Wrappers for the env: each a wrapper, or a pair of a wrapper and its
                arguments, which are a dict, a list, or a single argument.
            delay_setup: Whether the env is built when it is first needed.
            remove_time_limit: Whether the env's ``TimeLimit`` is removed.
            render_mode: Render mode for ``gym.make``.
            obs_type: The kind of observations: "coords" or None (the env's own), "rgb" or
                "grayscale".
            return_image: Whether infos have a picture, ``rgb``.
            env_fn: Makes the env. None: ``gym.make`` does.
            include_rng: Whether states hold the random generators of envs with random steps.
            **kwargs: Further arguments of ``gym.make``.

        Raises:
            ValueError: There is no such render mode, or no such type of observation.
        """
        register_as(type(self), "plangym.core:PlangymEnv")
        if render_mode not in self.AVAILABLE_RENDER_MODES:
            raise ValueError(f"Invalid render_mode: {render_mode!r}")
        if return_image and render_mode is None:
            raise ValueError("return_image=True requires render_mode='rgb_array', not None")
        self.obs_type = obs_type or self.DEFAULT_OBS_TYPE
        if self.obs_type not in self.AVAILABLE_OBS_TYPES:
            raise ValueError(f"obs_type must be coords, rgb or grayscale, not {obs_type!r}")
        self.name = name
        self.frameskip = frameskip
        self.autoreset = autoreset
        self.delay_setup = delay_setup
        self.remove_time_limit = remove_time_limit
        self.return_image = return_image
        self._render_mode = render_mode
        self._wrappers = wrappers
        self._kwargs = kwargs
        self._env_fn = env_fn
        self._include_rng = include_rng
        self._seed: int | None = None
        self._shared = SharedEnv(self._build, include_rng=include_rng)
        self._observation_space: gym.Space[Any] | None = None
        if not delay_setup:
            self.setup()

    # ---- the env itself ----------------------------------------------------------------------

    def setup(self) -> None:
        """Builds the env anew, and resets it."""
        self.close()
        _ = self.gym_env

    def _build(self) -> Any:
        if self._env_fn is not None:
            env = self._env_fn()
        else:
            env = gym.make(self.name, render_mode=self._render_mode, **self._kwargs)
        self._observation_space = None
        env = _without_time_limit(env) if self.remove_time_limit else env
        return _wrap(env, self._wrappers or ())

    @property
    def gym_env(self) -> Any:
        """The Gymnasium env, which is built when it is first needed."""
        return self._shared.env

    def apply_wrappers(self, wrappers: Iterable[Any]) -> None:
        """Wraps the env; ``wrappers`` are as for the constructor."""
        self._shared.env, self._observation_space = _wrap(self.gym_env, wrappers), None

    def wrap(self, wrapper: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Puts one wrapper around the env, with its arguments."""
        self._shared.env, self._observation_space = wrapper(self.gym_env, *args, **kwargs), None

    def seed(self, seed: int | None = None) -> None:
        """Seeds the env at its next reset, and its sampled actions."""
        self._seed = seed
        self.action_space.seed(seed)

    def clone(self, **changes: Any) -> GymnasiumEnv:
        """A new env, with the same arguments except for these changes."""
        arguments = {
            "name": self.name,
            "frameskip": self.frameskip,
            "autoreset": self.autoreset,
            "wrappers": self._wrappers,
            "delay_setup": self.delay_setup,
            "remove_time_limit": self.remove_time_limit,
            "render_mode": self._render_mode,
            "obs_type": self.obs_type,
            "return_image": self.return_image,
            "env_fn": self._env_fn,
            "include_rng": self._include_rng,
            **self._kwargs,
        }
        return type(self)(**{**arguments, **changes})

    def close(self) -> None:
        """Closes the env; another use builds it anew."""
        self._shared.close()

    def __repr__(self) -> str:
        """The env's name, and its main arguments."""
        return (
            f"{type(self).__name__}(name={self.name!r}, frameskip={self.frameskip}, "
            f"obs_type={self.obs_type!r}, render_mode={self.render_mode!r})"
        )

    # ---- properties of the env ---------------------------------------------------------------

    @property
    def unwrapped(self) -> GymnasiumEnv:
        """Itself."""
        return self

    @property
    def observation_space(self) -> Any:
        """The space of the observations, by ``obs_type``."""
        if self.obs_type == "coords":
            return self.gym_env.observation_space
        if self._observation_space is None:
            shape = self._observe(None).shape
            self._observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        return self._observation_space

    action_space = delegate("gym_env", "action_space")
    obs_shape = delegate("observation_space", "shape")
    action_shape = delegate("action_space", "shape")
    metadata = delegate("gym_env", "metadata")

    @property
    def img_shape(self) -> tuple[int, ...] | None:
        """The shape of images; None if the env has none."""
        try:
            return self.get_image().shape
        except Exception:  # the env cannot render, for whatever reason
            return None

    @property
    def render_mode(self) -> str | None:
        """The render mode of the env."""
        if self._env_fn is None or not self._shared.is_open:
            return self._render_mode
        mode: str | None = self.gym_env.render_mode
        return mode

    @property
    def reward_range(self) -> Any:
        """The reward range of the env; None where it has none."""
        return getattr(self.gym_env, "reward_range", None)

    def sample_action(self) -> Any:
        """A random action."""
        return self.action_space.sample()

    # ---- stepping ----------------------------------------------------------------------------

    @property
    def STATE_IS_ARRAY(self) -> bool:
        """Whether states are arrays."""
        return isinstance(self._shared.state.space, gym.spaces.Box)

    def get_state(self) -> Any:
        """The state of the env, wrappers included."""
        return self._shared.get_state()

    def set_state(self, state: Any) -> None:
        """Sets a state that ``get_state`` returned, of this env or of an equal one elsewhere."""
        self._shared.set_state(state)

    def reset(self, return_state: bool = True) -> tuple[Any, ...]:
        """Resets the env: ``(state, observation, info)``, or without the state."""
        seed, self._seed = self._seed, None
        info = self._with_image(self._shared.reset(**({} if seed is None else {"seed": seed})))
        result = self._observe(self._shared.observation), info
        return (self.get_state(), *result) if return_state else result

    def step_with_dt(self, action: Any, dt: int = 1) -> tuple[Any, ...]:
        """Repeats an action ``dt`` times ``frameskip``, as long as the episode goes on.

        Returns the env's own observation, whatever ``obs_type`` says, and the sum of the rewards;
        ``info["n_step"]`` is the number of steps made.
        """
        if int(dt) < 1:
            raise ValueError(f"dt must be at least 1, got {dt!r}")
        shared = self._shared
        reward, end, truncated, info = shared.step(action, int(dt) * self.frameskip)
        return shared.observation, reward, end, truncated, {**info, "n_step": shared.num_steps}

    def step(
        self, action: Any, state: Any = None, dt: int = 1, return_state: bool | None = None
    ) -> tuple[Any, ...]:
        """Steps the env, from a state if one is given; see plangym's ``PlangymEnv.step``."""
        if state is not None:
            self.set_state(state)
        observation, reward, end, truncated, info = self.step_with_dt(action, dt)
        info = self._with_image({**info, "dt": dt})
        result: tuple[Any, ...] = self._observe(observation), reward, end, truncated, info
        if return_state or (return_state is None and state is not None):
            result = (self.get_state(), *result)
        if self.autoreset and (end or truncated):
            self.reset(return_state=False)
        return result

    def step_batch(
        self, actions: Any, states: Any = None, dt: Any = 1, return_state: bool | None = None
    ) -> tuple[list[Any], ...]:
        """Steps a batch, one step after the other; takes and returns lists of ``step``'s values."""
        states = states_or_none(states)
        returns_state = states is not None if return_state is None else bool(return_state)
        rows = [
            self.step(action, state, times, returns_state)
            for action, state, times in zip(
                actions,
                [None] * len(actions) if states is None else states,
                repeat_counts(dt, len(actions)).tolist(),
                strict=True,
            )
        ]
        return tuple([row[i] for row in rows] for i in range(6 if returns_state else 5))

    # ---- pictures ----------------------------------------------------------------------------

    def render(self) -> Any:
        """Renders the env in its present state."""
        return self._shared.render()

    def get_image(self) -> npt.NDArray[np.uint8]:
        """An image, ``(height, width, 3)``.

        Raises:
            RuntimeError: The env was made without a render mode for images.
        """
        image = None if self.render_mode is None else self.render()
        if image is None:
            raise RuntimeError(
                f"Cannot get image when render_mode={self.render_mode}: make the env with "
                "render_mode='rgb_array'"
            )
        return np.asarray(image)

    def _with_image(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "rgb": self.get_image()} if self.return_image else info

    def _observe(self, observation: Any) -> Any:
        """The observation for ``obs_type``, from the env's own."""
        if self.obs_type == "coords":
            return observation
        image = self.get_image()
        if self.obs_type == "rgb":
            return image
        return ((image @ _GREY_WEIGHTS + 0x8000) >> 16).astype(np.uint8)


def states_or_none(states: Any) -> Any:
    """States of a batch; None if there are none, or all of them are None."""
    if states is None or (
        len(states) and states[0] is None and all(state is None for state in states)
    ):
        return None
    return states


def repeat_counts(dt: Any, count: int) -> npt.NDArray[np.int64]:
    """How often each action of a batch is repeated; fractions are dropped, as in plangym."""
    times = np.asarray(dt)
    return checked_dt(times.astype(np.int64) if times.dtype.kind == "f" else dt, count)


def _wrap(env: Any, wrappers: Iterable[Any]) -> Any:
    for wrapper in wrappers:
        wrap, arguments = wrapper if isinstance(wrapper, tuple) else (wrapper, ())
        if isinstance(arguments, dict):
            env = wrap(env, **arguments)
        elif isinstance(arguments, (list, tuple)):
            env = wrap(env, *arguments)
        else:
            env = wrap(env, arguments)
    return env


def _without_time_limit(env: Any) -> Any:
    if isinstance(env, TimeLimit):
        return env.env
    layer = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer.env, TimeLimit):
            layer.env = layer.env.env
        layer = layer.env
    return env
