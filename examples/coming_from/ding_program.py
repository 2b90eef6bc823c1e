"""DI-engine's DQN pipeline on CartPole, as in its own examples: only the env manager differs.

    python examples/coming_from/ding_program.py
    python examples/coming_from/ding_program.py --env-steps 500
    python examples/coming_from/ding_program.py --original     # with DI-engine's own manager

It needs DI-engine (0.5.3 was tried) and everything that ``ding.framework.middleware`` imports.
"""

import argparse
import warnings

import gymnasium as gym
import torch

with warnings.catch_warnings():  # of DI-engine's own imports
    warnings.simplefilter("ignore")
    from ding.config import compile_config
    from ding.data import DequeBuffer
    from ding.envs import DingEnvWrapper
    from ding.envs import SubprocessEnvManagerV2 as OriginalEnvManager
    from ding.framework import task
    from ding.framework.context import OnlineRLContext
    from ding.framework.middleware import (
        OffPolicyLearner,
        StepCollector,
        data_pusher,
        eps_greedy_handler,
        interaction_evaluator,
        termination_checker,
    )
    from ding.model import DQN
    from ding.policy import DQNPolicy
    from ding.utils import set_pkg_seed
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

from shmvec.adapters.ding import SubprocessEnvManagerV2


def make_env():
    """Makes an env in DI-engine's own wrapper."""
    return DingEnvWrapper(gym.make("CartPole-v1", max_episode_steps=200))


def main() -> None:
    """Trains, and prints how it went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-steps", type=int, default=3000)
    parser.add_argument("--original", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # such a small network gains nothing from more
    kind = OriginalEnvManager if options.original else SubprocessEnvManagerV2

    main_config.env.manager = {"reset_inplace": True}  # makes runs repeatable
    create_config.env_manager.type = "subprocess_v2"
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        collector_env = kind([make_env] * cfg.env.collector_env_num, cfg.env.manager)
        evaluator_env = kind([make_env] * cfg.env.evaluator_env_num, cfg.env.manager)
        collector_env.seed(cfg.seed)
        evaluator_env.seed(cfg.seed, dynamic_seed=False)
        set_pkg_seed(cfg.seed, use_cuda=False)
        buffer = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=DQN(**cfg.policy.model))

        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, collector_env))
        task.use(data_pusher(cfg, buffer))
        task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer))
        task.use(termination_checker(max_env_step=options.env_steps))
        task.run()
        print(f"{task.ctx.env_step} env steps, {task.ctx.train_iter} updates")
        print(f"last evaluation: {task.ctx.last_eval_value:.1f}")
    collector_env.close()
    evaluator_env.close()


if __name__ == "__main__":
    main()
