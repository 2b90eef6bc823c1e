"""The ways to step all envs, with the same results: in lockstep, by a mask, one by one."""

import numpy as np
from processes import gone

DEADLINE_S = 60


def lockstep(envs, actions):
    return envs.step(actions)


def masked(envs, actions):
    return envs.step(actions, mask=np.ones(envs.num_envs, bool))


def partial(envs, actions):
    envs.send(actions)
    return in_order(envs.recv(timeout=DEADLINE_S))


def in_order(results):
    """What recv() returned, in the order of envs."""
    *arrays, infos = results
    order = np.argsort(infos["env_id"])
    return (*(array[order] for array in arrays), _ordered(infos, order))


def _ordered(infos, order):
    return {
        key: _ordered(value, order) if isinstance(value, dict) else value[order]
        for key, value in infos.items()
    }


STEPS = [lockstep, masked, partial]


def faulty(infos, num_envs):
    """Mask of the envs that the infos have a fault of."""
    return infos.get("_fault", np.zeros(num_envs, bool))


def kill(envs, workers):
    """Kills workers, and waits until they are dead; the vector env has not looked yet."""
    processes = [envs.processes[worker] for worker in workers]
    for process in processes:
        process.kill()
    assert gone([process.pid for process in processes], DEADLINE_S)
