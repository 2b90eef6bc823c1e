"""plangym's ParallelEnv and ours, beside one another: a script, for test_plangym.py.

python tests/adapters/plangym_beside.py control:ClassicControl CartPole-v1
"""

import sys
from importlib import import_module

import numpy as np

from shmvec.adapters.plangym import ParallelEnv


def plain(values):
    """Values without their types, but for floats that are equal bit for bit."""
    return values.tolist() if isinstance(values, np.ndarray) else values


def main(env_class, name):
    """Steps both from the same states, and as they stand."""
    import plangym.vectorization
    from plangym.vectorization.env import VectorizedEnv

    module, _, class_name = env_class.partition(":")
    env_class = getattr(import_module(f"plangym.{module}"), class_name)
    old = plangym.vectorization.ParallelEnv(env_class, name, n_workers=2)
    ours = ParallelEnv(env_class, name, n_workers=2)
    assert isinstance(ours, VectorizedEnv) and isinstance(ours.unwrapped, plangym.PlanEnv)

    state, *_ = old.reset()
    states, actions = [], []
    for _ in range(30):
        action = 1 if name.startswith("Cart") else old.sample_action()  # so that it falls
        states.append(state)
        actions.append(action)
        state, *_, end, _, _ = old.step(action, state)
        if end:
            state, *_ = old.reset()
    dt = 1 + np.arange(30) % 3
    rows = 0
    for given in (states, None, [None] * 30):
        for env in (ours, old):
            env.sync_states(states[0])
        count = 30 if given is states else 6  # an env that resets itself draws its own start
        batch = actions[:count], given and given[:count], dt[:count]
        mine, others = ours.step_batch(*batch), old.step_batch(*batch)
        assert len(mine) == len(others) == 5 + (given is states)
        for of_mine, of_others in zip(mine, others, strict=True):
            assert type(of_mine) is type(of_others) is list and len(of_mine) == count
            if not (of_mine is mine[0] and name.startswith("ALE/") and given is states):
                # States of the emulator are objects that are not comparable.
                assert list(map(plain, of_mine)) == list(map(plain, of_others))
        rows += count
    ours.close()
    old.close()
    print(f"equal: {rows} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
