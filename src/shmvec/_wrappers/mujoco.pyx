"""Twins of Gymnasium's MuJoCo envs, v4 and v5, which wrap nothing.

MuJoCo is called as these envs call it, and so is a method that a subclass overrides. The rest of a
step is computed from MuJoCo's arrays; rewards are computed by NumPy's scalars, which warn as ever.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY, isfinite, isnan, sqrt
from libc.string cimport memcpy

import numpy as np

from shmvec._core.memory cimport data_of, has_dtype, is_writeable, ndim_of, new_like, size_of
from shmvec._wrappers.chain cimport Chain, Step, Twin
from shmvec._wrappers.numbers cimport (
    clear_flags,
    float32,
    float64,
    inside,
    is_plain,
    new_float64,
    raised_flags,
)

from shmvec._wrappers.results import rewarded

ctypedef fused real:
    float
    double

cdef Py_ssize_t _most = 128  # so many numbers NumPy adds up in one go; -1: it adds otherwise
cdef object _float32 = np.float32
cdef object _bool = np.bool_
cdef object _nothing = np.empty(0)
cdef object _two = np.empty(2)


cdef class MujocoEnv(Twin):
    """What the steps of these envs have in common."""
    cdef tuple known         # names of methods and properties that are as Gymnasium has them,
    cdef bint simulates      # whether do_simulation is among them,
    cdef bint knows_dt       # dt,
    cdef bint observes       # _get_obs,
    cdef bint rewards        # _get_rew,
    cdef bint costs          # control_cost,
    cdef bint judges         # is_healthy
    cdef bint survives       # and healthy_reward,
    cdef bint forgives       # and whether the unhealthy get it, too, if they are terminated
    cdef bint is_v5
    cdef bint clips          # whether observations' velocities are clipped
    cdef Py_ssize_t hides    # how many positions observations may leave out
    cdef object mujoco       # the module, and where these envs look it up
    cdef dict names
    cdef object observation  # one of the last size

    def __init__(self, env, Chain owner, frozenset known):
        """Makes a twin.

        Args:
            env: The env.
            owner: The chain.
            known: Names of its class's methods and properties that are as Gymnasium has them.
        """
        Twin.__init__(self, env, owner, None, None, None)
        kind = type(env)
        self.known = tuple(known - {"step"})  # which any twin sees to
        self.is_v5 = "_get_rew" in kind.step.__code__.co_names
        self.simulates = {"do_simulation", "_step_mujoco_simulation"} <= known
        if self.simulates:
            self.names = kind._step_mujoco_simulation.__globals__
            self.mujoco = self.names["mujoco"]
        self.knows_dt = "dt" in known
        self.observes = "_get_obs" in known
        self.rewards = "_get_rew" in known
        self.costs = "control_cost" in known
        self.judges = {"is_healthy", "state_vector"} <= known
        self.survives = "healthy_reward" in known
        self.forgives = self.survives and (
            "_terminate_when_unhealthy" in kind.healthy_reward.fget.__code__.co_names)
        self.hides = 1
        self.observation = _nothing

    cdef dict attributes(self):
        cdef dict own = Twin.attributes(self)
        if own is not None:
            for name in self.known:
                if name in own:
                    return None
        return own

    cdef object space(self, str name, str own):
        return getattr(self.wrapper, name)

    cdef int simulate(self, object action) except -1:
        """What ``do_simulation`` does."""
        env = self.wrapper
        frames = env.frame_skip
        if (self.simulates and self.names.get("mujoco") is self.mujoco
                and is_plain(action) and ndim_of(action) == 1):
            model, data = env.model, env.data
            control = data.ctrl
            if (_is_numbers(control) and is_writeable(control)
                    and size_of(action) == size_of(control) == model.nu
                    and _copy(action, control)):
                self.mujoco.mj_step(model, data, nstep=frames)
                PyErr_CheckSignals()  # a time limit, as where Python goes on
                self.mujoco.mj_rnePostConstraint(env.model, env.data)
                return 0
        env.do_simulation(action, frames)
        return 0

    cdef object place(self):
        """Where the env is: a number, or an array."""
        return self.wrapper.data.qpos[0]

    cdef tuple moved(self, object action):
        """Simulates: where the env is then, and how fast it came there."""
        env = self.wrapper
        before = self.place()
        self.simulate(action)
        after = self.place()
        if not self.knows_dt:
            return after, (after - before) / env.dt
        return after, _velocity(before, after, env.model.opt.timestep * env.frame_skip)

    cdef object observed(self):
        """What ``_get_obs`` returns."""
        cdef Py_ssize_t skipped, kept, speeds, more
        cdef double *made
        env = self.wrapper
        data = env.data
        positions, velocities = data.qpos, data.qvel
        if not (self.observes and _is_numbers(positions) and _is_numbers(velocities)):
            return env._get_obs()
        skipped = 0
        if env._exclude_current_positions_from_observation:
            skipped = min(self.hides, size_of(positions))
        forces = self.observed_forces()
        if not _is_numbers(forces):
            return env._get_obs()
        kept, speeds, more = size_of(positions) - skipped, size_of(velocities), size_of(forces)
        if size_of(self.observation) != kept + speeds + more:
            self.observation = np.empty(kept + speeds + more)
        observation = new_like(self.observation)
        made = <double *>data_of(observation)
        memcpy(made, <double *>data_of(positions) + skipped, kept * sizeof(double))
        memcpy(made + kept, data_of(velocities), speeds * sizeof(double))
        memcpy(made + kept + speeds, data_of(forces), more * sizeof(double))
        if self.clips:
            _clip(made + kept, speeds, -10, 10)
        return observation

    cdef object observed_forces(self):
        """What follows velocities in an observation."""
        return _nothing

    cdef object control_cost(self, object action):
        env = self.wrapper
        total = _sum_of_squares(action) if self.costs else None
        return env.control_cost(action) if total is None else env._ctrl_cost_weight * total

    cdef tuple rewarded(self, object velocity, object action):
        """What ``_get_rew`` returns."""
        env = self.wrapper
        if not self.rewards:
            return rewarded(env._get_rew(velocity, action))
        forward = env._forward_reward_weight * velocity
        cost = self.control_cost(action)
        return forward - cost, {"reward_forward": forward, "reward_ctrl": -cost}

    cdef object judged(self):
        """Whether the env is healthy; None: its own ``is_healthy`` must say it."""
        return None

    cdef object is_healthy(self):
        healthy = self.judged() if self.judges else None
        return self.wrapper.is_healthy if healthy is None else healthy

    cdef object healthy_reward(self):
        env = self.wrapper
        if not self.survives or type(env._healthy_reward) is not float:
            return env.healthy_reward
        if self.forgives:
            return float(self.is_healthy() or env._terminate_when_unhealthy) * env._healthy_reward
        return self.is_healthy() * env._healthy_reward

    cdef object terminated(self):
        env = self.wrapper
        if self.is_v5:
            return not self.is_healthy() and env._terminate_when_unhealthy
        if "terminated" not in self.known:
            return env.terminated
        return not self.is_healthy() if env._terminate_when_unhealthy else False

    cdef int end(self, Step step, object terminated) except -1:
        """Ends a step."""
        env = self.wrapper
        if env.render_mode == "human":
            env.render()
        step.terminated, step.truncated, step.is_unusual = terminated, False, False
        return 0


@cython.final
cdef class HalfCheetahEnv(MujocoEnv):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        env = self.wrapper
        after, velocity = self.moved(action)
        if self.is_v5:
            step.observation = self.observed()
            step.reward, rewards = self.rewarded(velocity, action)
            step.info = {"x_position": after, "x_velocity": velocity, **rewards}
        else:
            cost = self.control_cost(action)
            forward = env._forward_reward_weight * velocity
            step.observation = self.observed()
            step.reward = forward - cost
            step.info = {"x_position": after, "x_velocity": velocity, "reward_run": forward,
                         "reward_ctrl": -cost}
        return self.end(step, False)


cdef class _Walker(MujocoEnv):
    """HopperEnv and Walker2dEnv, which are healthy within ranges of height and angle."""

    def __init__(self, env, Chain owner, frozenset known):
        MujocoEnv.__init__(self, env, owner, known)
        self.clips = True

    cdef int step_with(self, dict own, object action, Step step) except -1:
        env = self.wrapper
        after, velocity = self.moved(action)
        if self.is_v5:
            step.observation = self.observed()
            step.reward, rewards = self.rewarded(velocity, action)
            terminated = self.terminated()
            height = env.data.qpos[1] - env.init_qpos[1]
            step.info = {"x_position": after, "z_distance_from_origin": height,
                         "x_velocity": velocity, **rewards}
        else:
            cost = self.control_cost(action)
            forward = env._forward_reward_weight * velocity
            total = forward + self.healthy_reward()
            step.observation = self.observed()
            step.reward = total - cost
            terminated = self.terminated()
            step.info = {"x_position": after, "x_velocity": velocity}
        return self.end(step, terminated)

    cdef tuple rewarded(self, object velocity, object action):
        """What ``_get_rew`` returns."""
        env = self.wrapper
        if not self.rewards:
            return rewarded(env._get_rew(velocity, action))
        forward = env._forward_reward_weight * velocity
        healthy = self.healthy_reward()
        total = forward + healthy
        cost = self.control_cost(action)
        return total - cost, {"reward_forward": forward, "reward_ctrl": -cost,
                              "reward_survive": healthy}

    cdef int upright(self, object positions) except -1:
        """Whether height and angle are in their ranges; 2: not known."""
        cdef double low, high, least, most
        env = self.wrapper
        if not (_is_numbers(positions) and size_of(positions) > 2
                and _is_range(env._healthy_z_range, &low, &high)
                and _is_range(env._healthy_angle_range, &least, &most)):
            return 2
        cdef const double *numbers = <double *>data_of(positions)
        return low < numbers[1] < high and least < numbers[2] < most


@cython.final
cdef class HopperEnv(_Walker):
    cdef object judged(self):
        cdef double low, high
        cdef int upright
        env = self.wrapper
        positions, velocities = env.data.qpos, env.data.qvel
        if not _is_numbers(velocities) or not _is_range(env._healthy_state_range, &low, &high):
            return None
        upright = self.upright(positions)
        if upright == 2:
            return None
        return (upright == 1 and _are_within(positions, 2, low, high)
                and _are_within(velocities, 0, low, high))


@cython.final
cdef class Walker2dEnv(_Walker):
    cdef object judged(self):
        cdef int upright = self.upright(self.wrapper.data.qpos)
        return None if upright == 2 else _bool(upright)


cdef class _Planar(MujocoEnv):
    """SwimmerEnv and AntEnv, which move on two axes."""

    def __init__(self, env, Chain owner, frozenset known):
        MujocoEnv.__init__(self, env, owner, known)
        self.hides = 2

    cdef object place(self):
        return _first_two(self.wrapper.data.qpos)

    cdef dict described(self, object place, object x_velocity, object y_velocity):
        """What infos have in common."""
        return {"x_position": place[0], "y_position": place[1],
                "distance_from_origin": _length(place),
                "x_velocity": x_velocity, "y_velocity": y_velocity}


@cython.final
cdef class SwimmerEnv(_Planar):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        env = self.wrapper
        place, (x_velocity, y_velocity) = self.moved(action)
        if self.is_v5:
            step.observation = self.observed()
            step.reward, rewards = self.rewarded(x_velocity, action)
            step.info = {**self.described(place, x_velocity, y_velocity), **rewards}
        else:
            forward = env._forward_reward_weight * x_velocity
            cost = self.control_cost(action)
            step.observation = self.observed()
            step.reward = forward - cost
            step.info = {"reward_fwd": forward, "reward_ctrl": -cost,
                         **self.described(place, x_velocity, y_velocity),
                         "forward_reward": forward}
        return self.end(step, False)


@cython.final
cdef class AntEnv(_Planar):
    cdef bint charges  # whether contact_cost and contact_forces are as Gymnasium has them

    def __init__(self, env, Chain owner, frozenset known):
        _Planar.__init__(self, env, owner, known)
        self.charges = {"contact_cost", "contact_forces"} <= known
        self.observes = self.observes and "contact_forces" in known

    cdef int step_with(self, dict own, object action, Step step) except -1:
        env = self.wrapper
        place, (x_velocity, y_velocity) = self.moved(action)
        if self.is_v5:
            step.observation = self.observed()
            step.reward, rewards = self.rewarded(x_velocity, action)
            terminated = self.terminated()
            place = env.data.qpos[0:2]
            step.info = {**self.described(place, x_velocity, y_velocity), **rewards}
        else:
            healthy = self.healthy_reward()
            total = x_velocity + healthy
            costs = cost = self.control_cost(action)
            terminated = self.terminated()
            step.observation = self.observed()
            step.info = {"reward_forward": x_velocity, "reward_ctrl": -cost,
                         "reward_survive": healthy,
                         **self.described(place, x_velocity, y_velocity),
                         "forward_reward": x_velocity}
            if env._use_contact_forces:
                contact = self.contact_cost()
                costs += contact
                step.info["reward_ctrl"] = -contact
            step.reward = total - costs
        return self.end(step, terminated)

    cdef object place(self):
        env = self.wrapper
        if self.is_v5:
            return _first_two(env.data.body(env._main_body).xpos)
        return _first_two(env.get_body_com("torso"))

    cdef object observed_forces(self):
        env = self.wrapper
        if self.is_v5:
            if env._include_cfrc_ext_in_observation:
                return self.contact_forces()[1:].flatten()
        elif env._use_contact_forces:
            return self.contact_forces().flatten()
        return _nothing

    cdef object contact_forces(self):
        """What the property of this name, which is Gymnasium's, returns: a new array."""
        cdef double low, high
        env = self.wrapper
        forces = env.data.cfrc_ext
        if not (is_plain(forces) and has_dtype(forces, float64)
                and _is_range(env._contact_force_range, &low, &high) and low < 0 < high):
            return env.contact_forces
        clipped = new_like(forces)
        memcpy(data_of(clipped), data_of(forces), size_of(forces) * sizeof(double))
        _clip(<double *>data_of(clipped), size_of(clipped), low, high)
        return clipped

    cdef object contact_cost(self):
        env = self.wrapper
        if not self.charges:
            return env.contact_cost
        forces = self.contact_forces()
        total = _sum_of_squares(forces)
        if total is None:
            total = np.sum(np.square(forces))
        return env._contact_cost_weight * total

    cdef tuple rewarded(self, object velocity, object action):
        env = self.wrapper
        if not self.rewards:
            return rewarded(env._get_rew(velocity, action))
        forward = velocity * env._forward_reward_weight
        healthy = self.healthy_reward()
        total = forward + healthy
        cost = self.control_cost(action)
        contact = self.contact_cost()
        return total - (cost + contact), {
            "reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact,
            "reward_survive": healthy}

    cdef object judged(self):
        cdef double low, high
        env = self.wrapper
        positions, velocities = env.data.qpos, env.data.qvel
        if not (_is_numbers(positions) and size_of(positions) > 2 and _is_numbers(velocities)
                and _is_range(env._healthy_z_range, &low, &high)):
            return None
        return _bool(_are_within(positions, 0, -INFINITY, INFINITY)
                     and _are_within(velocities, 0, -INFINITY, INFINITY)
                     and low <= (<double *>data_of(positions))[2] <= high)


cdef bint _is_numbers(object array) noexcept:
    """Whether it is an axis of float64 that C may read."""
    return is_plain(array) and ndim_of(array) == 1 and has_dtype(array, float64)


cdef bint _are_within(object array, Py_ssize_t start, double low, double high) noexcept:
    """Whether an array's numbers from ``start`` on are in a range."""
    cdef const double *numbers = <double *>data_of(array)
    cdef Py_ssize_t i
    for i in range(start, size_of(array)):
        if not low < numbers[i] < high:
            return False
    return True


cdef object _length(object place):
    """``np.linalg.norm(place, ord=2)``; how its products are rounded is BLAS's own."""
    if _most < 0 or not _is_numbers(place):
        return np.linalg.norm(place, ord=2)
    return new_float64(sqrt(place.dot(place)))


cdef object _first_two(object array):
    """A copy of an array's first two numbers."""
    if not _is_numbers(array) or size_of(array) < 2:
        return array[:2].copy()
    copied = new_like(_two)
    memcpy(data_of(copied), data_of(array), 2 * sizeof(double))
    return copied


cdef object _velocity(object before, object after, object dt):
    """``(after - before) / dt``, of numbers or of arrays."""
    cdef double *made
    cdef Py_ssize_t i
    if (type(dt) is float and _is_numbers(before) and _is_numbers(after)
            and size_of(before) == size_of(after)):
        velocity = new_like(after)
        made = <double *>data_of(velocity)
        clear_flags()
        for i in range(size_of(after)):
            made[i] = (<double *>data_of(after))[i] - (<double *>data_of(before))[i]
            made[i] /= <double>dt
        if not raised_flags():
            return velocity
    return (after - before) / dt  # which warns


cdef bint _is_range(object given, double *low, double *high) except -1:
    """Whether it is a tuple of two floats, which are written to ``low`` and ``high``."""
    if type(given) is not tuple or len(<tuple>given) != 2:
        return False
    least, most = <tuple>given
    if type(least) is not float or type(most) is not float:
        return False
    low[0], high[0] = least, most
    return True


cdef bint _copy(object action, object control) noexcept:
    """Copies an action to the array of controls, of the same size; False: NumPy must do it."""
    cdef double *controls = <double *>data_of(control)
    cdef Py_ssize_t i
    if has_dtype(action, float32):
        for i in range(size_of(action)):
            controls[i] = (<float *>data_of(action))[i]
            if isnan(controls[i]):
                return False  # NumPy warns of some that it casts
    elif has_dtype(action, float64):
        for i in range(size_of(action)):
            controls[i] = (<double *>data_of(action))[i]
    else:
        return False
    return True


cdef void _clip(double *numbers, Py_ssize_t count, double low, double high) noexcept:
    cdef Py_ssize_t i
    for i in range(count):
        if numbers[i] < low:
            numbers[i] = low
        elif numbers[i] > high:
            numbers[i] = high


cdef object _sum_of_squares(object array):
    """``np.sum(np.square(array))``; None: NumPy must compute it."""
    if not is_plain(array) or size_of(array) > _most:
        return None
    cdef bint single = has_dtype(array, float32)
    if not single and not has_dtype(array, float64):
        return None
    total = new_float64(0)
    clear_flags()
    if single:
        _add_squares[float](<float *>data_of(array), size_of(array), inside(total))
    else:
        _add_squares[double](<double *>data_of(array), size_of(array), inside(total))
    if raised_flags() or not isfinite(inside(total)[0]):
        return None
    return _float32(total) if single else total


cdef void _add_squares(const real *numbers, Py_ssize_t count, double *total) noexcept:
    """Adds squares in NumPy's order: eight sums, which are added in pairs, then the others."""
    cdef real sums[8]
    cdef real added = 0
    cdef Py_ssize_t i = 0
    cdef Py_ssize_t k
    if count >= 8:
        for k in range(8):
            sums[k] = numbers[k] * numbers[k]
        for i in range(8, count - count % 8, 8):
            for k in range(8):
                sums[k] += numbers[i + k] * numbers[i + k]
        added = (((sums[0] + sums[1]) + (sums[2] + sums[3]))
                 + ((sums[4] + sums[5]) + (sums[6] + sums[7])))
        i = count - count % 8
    for k in range(i, count):
        added += numbers[k] * numbers[k]
    total[0] = added


def _adds_alike():
    """Whether NumPy adds in this order, and how it computes a length."""
    for count in range(_most + 1):
        for dtype in (float32, float64):
            numbers = (np.cos(np.arange(count)) * 3).astype(dtype)
            rows = numbers.reshape(2 - count % 2, -1)
            if not _sum_of_squares(rows) == np.sum(np.square(rows)) == np.sum(np.square(numbers)):
                return False
            if count == 2 and _length(numbers) != np.linalg.norm(numbers, ord=2):
                return False
    return True


if not _adds_alike():
    _most = -1
