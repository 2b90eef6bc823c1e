"""Twins of Gymnasium's MuJoCo envs, v4 and v5, which wrap nothing.

MuJoCo, and methods that a subclass overrides, are called as these envs call them. The rest of a
step is computed from MuJoCo's arrays. Rewards are computed by NumPy's scalars, which warn as usual.
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
    value_pointer,
    is_plain,
    new_float64,
    raised_flags,
)

from shmvec._wrappers.results import unpack_reward

ctypedef fused real:
    float
    double

# NumPy adds up to this many numbers in one pass; -1: in an order that is not known.
cdef Py_ssize_t _max_sum_size = 128
cdef object _float32 = np.float32
cdef object _bool = np.bool_
cdef object _empty = np.empty(0)
cdef object _pair = np.empty(2)


cdef class MujocoEnv(Twin):
    """The common parts of the steps of these envs."""
    cdef tuple known_names          # methods and properties that are Gymnasium's
    # Which of these methods and properties are among them:
    cdef bint knows_simulation      # do_simulation
    cdef bint knows_dt              # dt
    cdef bint knows_observation     # _get_obs
    cdef bint knows_reward          # _get_rew
    cdef bint knows_control_cost    # control_cost
    cdef bint knows_health          # is_healthy
    cdef bint knows_healthy_reward  # healthy_reward
    cdef bint rewards_unhealthy     # whether it is also for unhealthy envs, whose episodes end
    cdef bint is_v5
    cdef bint clips_velocities      # in observations
    cdef Py_ssize_t max_hidden_positions  # that observations may leave out
    cdef object mujoco              # the module
    cdef dict namespace             # where these envs look it up
    cdef object observation         # an array of the last size

    def __init__(self, env, Chain chain, frozenset known_names):
        """Makes a twin.

        Args:
            env: The env.
            chain: Its chain.
            known_names: The names of methods and properties of its class that are Gymnasium's.
        """
        Twin.__init__(self, env, chain, None, None, None)
        kind = type(env)
        self.known_names = tuple(known_names - {"step"})  # which Twin checks
        self.is_v5 = "_get_rew" in kind.step.__code__.co_names
        self.knows_simulation = {"do_simulation", "_step_mujoco_simulation"} <= known_names
        if self.knows_simulation:
            self.namespace = kind._step_mujoco_simulation.__globals__
            self.mujoco = self.namespace["mujoco"]
        self.knows_dt = "dt" in known_names
        self.knows_observation = "_get_obs" in known_names
        self.knows_reward = "_get_rew" in known_names
        self.knows_control_cost = "control_cost" in known_names
        self.knows_health = {"is_healthy", "state_vector"} <= known_names
        self.knows_healthy_reward = "healthy_reward" in known_names
        self.rewards_unhealthy = self.knows_healthy_reward and (
            "_terminate_when_unhealthy" in kind.healthy_reward.fget.__code__.co_names)
        self.max_hidden_positions = 1
        self.observation = _empty

    cdef dict checked_attributes(self):
        cdef dict attributes = Twin.checked_attributes(self)
        if attributes is not None:
            for name in self.known_names:
                if name in attributes:
                    return None
        return attributes

    cdef object space(self, str name, str private_name):
        return getattr(self.wrapper, name)

    cdef int simulate(self, object action) except -1:
        """Does what ``do_simulation`` does."""
        env = self.wrapper
        frames = env.frame_skip
        if (self.knows_simulation and self.namespace.get("mujoco") is self.mujoco
                and is_plain(action) and ndim_of(action) == 1):
            model, data = env.model, env.data
            control = data.ctrl
            if (_is_numbers(control) and is_writeable(control)
                    and size_of(action) == size_of(control) == model.nu
                    and _copy(action, control)):
                self.mujoco.mj_step(model, data, nstep=frames)
                PyErr_CheckSignals()  # a time limit is a signal; Python would check for it here
                self.mujoco.mj_rnePostConstraint(env.model, env.data)
                return 0
        env.do_simulation(action, frames)
        return 0

    cdef object position(self):
        """The position of the env: a number, or an array."""
        return self.wrapper.data.qpos[0]

    cdef tuple move(self, object action):
        """Simulates; returns the new position, and the velocity."""
        env = self.wrapper
        before = self.position()
        self.simulate(action)
        after = self.position()
        if not self.knows_dt:
            return after, (after - before) / env.dt
        return after, _velocity(before, after, env.model.opt.timestep * env.frame_skip)

    cdef object make_observation(self):
        """Returns what ``_get_obs`` returns."""
        cdef Py_ssize_t skipped, num_positions, num_velocities, num_forces
        cdef double *target
        env = self.wrapper
        data = env.data
        positions, velocities = data.qpos, data.qvel
        if not (self.knows_observation and _is_numbers(positions) and _is_numbers(velocities)):
            return env._get_obs()
        skipped = 0
        if env._exclude_current_positions_from_observation:
            skipped = min(self.max_hidden_positions, size_of(positions))
        forces = self.forces_in_observation()
        if not _is_numbers(forces):
            return env._get_obs()
        num_positions = size_of(positions) - skipped
        num_velocities, num_forces = size_of(velocities), size_of(forces)
        if size_of(self.observation) != num_positions + num_velocities + num_forces:
            self.observation = np.empty(num_positions + num_velocities + num_forces)
        observation = new_like(self.observation)
        target = <double *>data_of(observation)
        memcpy(target, <double *>data_of(positions) + skipped, num_positions * sizeof(double))
        memcpy(target + num_positions, data_of(velocities), num_velocities * sizeof(double))
        memcpy(target + num_positions + num_velocities, data_of(forces),
               num_forces * sizeof(double))
        if self.clips_velocities:
            _clip(target + num_positions, num_velocities, -10, 10)
        return observation

    cdef object forces_in_observation(self):
        """The part of an observation after the velocities."""
        return _empty

    cdef object control_cost(self, object action):
        env = self.wrapper
        total = _sum_of_squares(action) if self.knows_control_cost else None
        return env.control_cost(action) if total is None else env._ctrl_cost_weight * total

    cdef tuple compute_reward(self, object velocity, object action):
        """What ``_get_rew`` returns."""
        env = self.wrapper
        if not self.knows_reward:
            return unpack_reward(env._get_rew(velocity, action))
        forward = env._forward_reward_weight * velocity
        cost = self.control_cost(action)
        return forward - cost, {"reward_forward": forward, "reward_ctrl": -cost}

    cdef object compute_health(self):
        """Whether the env is healthy; None if that is left to its own ``is_healthy``."""
        return None

    cdef object is_healthy(self):
        healthy = self.compute_health() if self.knows_health else None
        return self.wrapper.is_healthy if healthy is None else healthy

    cdef object healthy_reward(self):
        env = self.wrapper
        if not self.knows_healthy_reward or type(env._healthy_reward) is not float:
            return env.healthy_reward
        if self.rewards_unhealthy:
            return float(self.is_healthy() or env._terminate_when_unhealthy) * env._healthy_reward
        return self.is_healthy() * env._healthy_reward

    cdef object terminated(self):
        env = self.wrapper
        if self.is_v5:
            return not self.is_healthy() and env._terminate_when_unhealthy
        if "terminated" not in self.known_names:
            return env.terminated
        return not self.is_healthy() if env._terminate_when_unhealthy else False

    cdef int end(self, Step step, object terminated) except -1:
        env = self.wrapper
        if env.render_mode == "human":
            env.render()
        step.terminated, step.truncated, step.is_unusual = terminated, False, False
        return 0


@cython.final
cdef class HalfCheetahEnv(MujocoEnv):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        env = self.wrapper
        after, velocity = self.move(action)
        if self.is_v5:
            step.observation = self.make_observation()
            step.reward, reward_infos = self.compute_reward(velocity, action)
            step.info = {"x_position": after, "x_velocity": velocity, **reward_infos}
        else:
            cost = self.control_cost(action)
            forward = env._forward_reward_weight * velocity
            step.observation = self.make_observation()
            step.reward = forward - cost
            step.info = {"x_position": after, "x_velocity": velocity, "reward_run": forward,
                         "reward_ctrl": -cost}
        return self.end(step, False)


cdef class _Walker(MujocoEnv):
    """HopperEnv and Walker2dEnv, whose health depends on height and angle."""

    def __init__(self, env, Chain chain, frozenset known_names):
        MujocoEnv.__init__(self, env, chain, known_names)
        self.clips_velocities = True

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        env = self.wrapper
        after, velocity = self.move(action)
        if self.is_v5:
            step.observation = self.make_observation()
            step.reward, reward_infos = self.compute_reward(velocity, action)
            terminated = self.terminated()
            height = env.data.qpos[1] - env.init_qpos[1]
            step.info = {"x_position": after, "z_distance_from_origin": height,
                         "x_velocity": velocity, **reward_infos}
        else:
            cost = self.control_cost(action)
            forward = env._forward_reward_weight * velocity
            total = forward + self.healthy_reward()
            step.observation = self.make_observation()
            step.reward = total - cost
            terminated = self.terminated()
            step.info = {"x_position": after, "x_velocity": velocity}
        return self.end(step, terminated)

    cdef tuple compute_reward(self, object velocity, object action):
        """What ``_get_rew`` returns."""
        env = self.wrapper
        if not self.knows_reward:
            return unpack_reward(env._get_rew(velocity, action))
        forward = env._forward_reward_weight * velocity
        healthy = self.healthy_reward()
        total = forward + healthy
        cost = self.control_cost(action)
        return total - cost, {"reward_forward": forward, "reward_ctrl": -cost,
                              "reward_survive": healthy}

    cdef int upright(self, object positions) except -1:
        """Whether height and angle are in their ranges; 2 if that is left to Python."""
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
    cdef object compute_health(self):
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
    cdef object compute_health(self):
        cdef int upright = self.upright(self.wrapper.data.qpos)
        return None if upright == 2 else _bool(upright)


cdef class _Planar(MujocoEnv):
    """SwimmerEnv and AntEnv, which move in two dimensions."""

    def __init__(self, env, Chain chain, frozenset known_names):
        MujocoEnv.__init__(self, env, chain, known_names)
        self.max_hidden_positions = 2

    cdef object position(self):
        return _first_two(self.wrapper.data.qpos)

    cdef dict describe_position(self, object position, object x_velocity, object y_velocity):
        """The common part of infos."""
        return {"x_position": position[0], "y_position": position[1],
                "distance_from_origin": _length(position),
                "x_velocity": x_velocity, "y_velocity": y_velocity}


@cython.final
cdef class SwimmerEnv(_Planar):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        env = self.wrapper
        position, (x_velocity, y_velocity) = self.move(action)
        if self.is_v5:
            step.observation = self.make_observation()
            step.reward, reward_infos = self.compute_reward(x_velocity, action)
            step.info = {**self.describe_position(position, x_velocity, y_velocity), **reward_infos}
        else:
            forward = env._forward_reward_weight * x_velocity
            cost = self.control_cost(action)
            step.observation = self.make_observation()
            step.reward = forward - cost
            step.info = {"reward_fwd": forward, "reward_ctrl": -cost,
                         **self.describe_position(position, x_velocity, y_velocity),
                         "forward_reward": forward}
        return self.end(step, False)


@cython.final
cdef class AntEnv(_Planar):
    cdef bint knows_contact  # whether contact_cost and contact_forces are as Gymnasium has them

    def __init__(self, env, Chain chain, frozenset known_names):
        _Planar.__init__(self, env, chain, known_names)
        self.knows_contact = {"contact_cost", "contact_forces"} <= known_names
        self.knows_observation = self.knows_observation and "contact_forces" in known_names

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        env = self.wrapper
        position, (x_velocity, y_velocity) = self.move(action)
        if self.is_v5:
            step.observation = self.make_observation()
            step.reward, reward_infos = self.compute_reward(x_velocity, action)
            terminated = self.terminated()
            position = env.data.qpos[0:2]
            step.info = {**self.describe_position(position, x_velocity, y_velocity), **reward_infos}
        else:
            healthy = self.healthy_reward()
            total = x_velocity + healthy
            knows_control_cost = cost = self.control_cost(action)
            terminated = self.terminated()
            step.observation = self.make_observation()
            step.info = {"reward_forward": x_velocity, "reward_ctrl": -cost,
                         "reward_survive": healthy,
                         **self.describe_position(position, x_velocity, y_velocity),
                         "forward_reward": x_velocity}
            if env._use_contact_forces:
                contact = self.contact_cost()
                knows_control_cost += contact
                step.info["reward_ctrl"] = -contact
            step.reward = total - knows_control_cost
        return self.end(step, terminated)

    cdef object position(self):
        env = self.wrapper
        if self.is_v5:
            return _first_two(env.data.body(env._main_body).xpos)
        return _first_two(env.get_body_com("torso"))

    cdef object forces_in_observation(self):
        env = self.wrapper
        if self.is_v5:
            if env._include_cfrc_ext_in_observation:
                return self.contact_forces()[1:].flatten()
        elif env._use_contact_forces:
            return self.contact_forces().flatten()
        return _empty

    cdef object contact_forces(self):
        """Returns what Gymnasium's property of this name returns, a new array."""
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
        if not self.knows_contact:
            return env.contact_cost
        forces = self.contact_forces()
        total = _sum_of_squares(forces)
        if total is None:
            total = np.sum(np.square(forces))
        return env._contact_cost_weight * total

    cdef tuple compute_reward(self, object velocity, object action):
        env = self.wrapper
        if not self.knows_reward:
            return unpack_reward(env._get_rew(velocity, action))
        forward = velocity * env._forward_reward_weight
        healthy = self.healthy_reward()
        total = forward + healthy
        cost = self.control_cost(action)
        contact = self.contact_cost()
        return total - (cost + contact), {
            "reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact,
            "reward_survive": healthy}

    cdef object compute_health(self):
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
    """Whether it is a one-dimensional array of float64 that C may read."""
    return is_plain(array) and ndim_of(array) == 1 and has_dtype(array, float64)


cdef bint _are_within(object array, Py_ssize_t start, double low, double high) noexcept:
    """Whether an array's numbers from index ``start`` on are between two limits."""
    cdef const double *numbers = <double *>data_of(array)
    cdef Py_ssize_t i
    for i in range(start, size_of(array)):
        if not low < numbers[i] < high:
            return False
    return True


cdef object _length(object position):
    """``np.linalg.norm(position, ord=2)``; BLAS decides how its products are rounded."""
    if _max_sum_size < 0 or not _is_numbers(position):
        return np.linalg.norm(position, ord=2)
    return new_float64(sqrt(position.dot(position)))


cdef object _first_two(object array):
    """A copy of an array's first two numbers."""
    if not _is_numbers(array) or size_of(array) < 2:
        return array[:2].copy()
    pair = new_like(_pair)
    memcpy(data_of(pair), data_of(array), 2 * sizeof(double))
    return pair


cdef object _velocity(object before, object after, object dt):
    """``(after - before) / dt``, of numbers or of arrays."""
    cdef double *target
    cdef Py_ssize_t i
    if (type(dt) is float and _is_numbers(before) and _is_numbers(after)
            and size_of(before) == size_of(after)):
        velocity = new_like(after)
        target = <double *>data_of(velocity)
        clear_flags()
        for i in range(size_of(after)):
            target[i] = (<double *>data_of(after))[i] - (<double *>data_of(before))[i]
            target[i] /= <double>dt
        if not raised_flags():
            return velocity
    return (after - before) / dt  # which warns


cdef bint _is_range(object bounds, double *low, double *high) except -1:
    """Whether it is a tuple of two floats, which are written to ``low`` and ``high``."""
    if type(bounds) is not tuple or len(<tuple>bounds) != 2:
        return False
    least, most = <tuple>bounds
    if type(least) is not float or type(most) is not float:
        return False
    low[0], high[0] = least, most
    return True


cdef bint _copy(object action, object control) noexcept:
    """Copies an action to the array of controls, of equal size; False if it is left to NumPy."""
    cdef double *controls = <double *>data_of(control)
    cdef Py_ssize_t i
    if has_dtype(action, float32):
        for i in range(size_of(action)):
            controls[i] = (<float *>data_of(action))[i]
            if isnan(controls[i]):
                return False  # NumPy warns when it casts some of them
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
    """``np.sum(np.square(array))``; None if it is left to NumPy."""
    if not is_plain(array) or size_of(array) > _max_sum_size:
        return None
    cdef bint single = has_dtype(array, float32)
    if not single and not has_dtype(array, float64):
        return None
    total = new_float64(0)
    clear_flags()
    if single:
        _add_squares[float](<float *>data_of(array), size_of(array), value_pointer(total))
    else:
        _add_squares[double](<double *>data_of(array), size_of(array), value_pointer(total))
    if raised_flags() or not isfinite(value_pointer(total)[0]):
        return None
    return _float32(total) if single else total


cdef void _add_squares(const real *numbers, Py_ssize_t count, double *total) noexcept:
    """Adds squares in NumPy's order: eight sums, which are added in pairs, and then the rest."""
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


def _matches_numpy():
    """Whether NumPy adds in this order, and computes lengths as `_length` does."""
    for count in range(_max_sum_size + 1):
        for dtype in (float32, float64):
            numbers = (np.cos(np.arange(count)) * 3).astype(dtype)
            rows = numbers.reshape(2 - count % 2, -1)
            if not _sum_of_squares(rows) == np.sum(np.square(rows)) == np.sum(np.square(numbers)):
                return False
            if count == 2 and _length(numbers) != np.linalg.norm(numbers, ord=2):
                return False
    return True


if not _matches_numpy():
    _max_sum_size = -1
