"""Small programs of libraries that make vector envs, as their users write them.

Each is called with whether Gymnasium's class is to be ours, and returns what it has seen or learnt.
"""

import contextlib
import functools

import gymnasium as gym
import numpy as np
import torch

import shmvec

ID = "CartPole-v1"
NUM_ENVS = 4
made: list[type] = []


def count(cls):
    """A list that grows whenever one of the class is made."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        made.append(cls)
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    return made


def installed(ours):
    """What `shmvec.install()` does, or nothing."""
    np.random.seed(1)
    torch.manual_seed(1)
    return shmvec.install() if ours else contextlib.nullcontext()


def weights(module):
    """All that a network has learnt."""
    return [parameter.detach().cpu().numpy().copy() for parameter in module.parameters()]


def cleanrl(ours):
    """PPO in one file, as CleanRL writes it."""
    with installed(ours):
        envs = gym.make_vec(ID, NUM_ENVS, vectorization_mode="async")
        envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        agent = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
        observation = torch.tensor(envs.reset(seed=1)[0])
        done = torch.zeros(NUM_ENVS)
        returns = []
        for _ in range(5):
            batch = []
            for _ in range(64):
                with torch.no_grad():
                    out = agent(observation)
                policy = torch.distributions.Categorical(logits=out[:, :2])
                action = policy.sample()
                before, was_done = observation, done
                results = envs.step(action.numpy())
                observation = torch.tensor(results[0])
                done = torch.tensor(results[2] | results[3]).float()
                if "episode" in results[4]:
                    returns += results[4]["episode"]["r"][results[4]["_episode"]].tolist()
                reward = torch.tensor(results[1]).float()
                log_prob = policy.log_prob(action)
                batch.append((before, action, log_prob, out[:, 2], reward, done, 1 - was_done))
            with torch.no_grad():
                value, advantage, advantages = agent(observation)[:, 2], torch.zeros(NUM_ENVS), []
            for _, _, _, now, reward, over, _ in reversed(batch):
                delta = reward + 0.99 * value * (1 - over) - now
                advantage = delta + 0.99 * 0.95 * (1 - over) * advantage
                advantages.insert(0, advantage)
                value = now
            kept = [torch.cat(part) for part in zip(*batch, strict=True)]
            advantages = torch.cat(advantages)
            for _ in range(4):
                out = agent(kept[0])
                policy = torch.distributions.Categorical(logits=out[:, :2])
                ratio = (policy.log_prob(kept[1]) - kept[2]).exp()
                clipped = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
                error = (out[:, 2] - advantages - kept[3]) ** 2
                loss = ((0.5 * error - clipped) * kept[6]).mean() - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        envs.close()
    return returns, weights(agent)


def torchrl(ours):
    """A rollout of TorchRL's GymEnv, whose envs are vectorised by AsyncVectorEnv."""
    from torchrl.envs import GymEnv

    with installed(ours):
        env = GymEnv(ID, num_envs=NUM_ENVS)
        env.set_seed(1)
        rollout = env.rollout(100, break_when_any_done=False)
        env.close()
    return {
        "/".join(key): value.numpy()
        for key, value in sorted(rollout.flatten_keys("/").items())
        for key in [key.split("/")]
    }


def rllib(ours):
    """What an EnvRunner of RLlib's PPO samples, with `gym_env_vectorize_mode="async"`."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig

    with installed(ours):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            config = (
                PPOConfig()
                .environment(ID)
                .env_runners(
                    num_env_runners=0,
                    num_envs_per_env_runner=NUM_ENVS,
                    gym_env_vectorize_mode="async",
                )
                .training(train_batch_size=256, minibatch_size=64, num_epochs=2)
                .debugging(seed=1)
            )
            algorithm = config.build_algo()
            results = [algorithm.train()["env_runners"] for _ in range(2)]
            algorithm.stop()
        finally:
            ray.shutdown()
    return [(one["episode_return_mean"], one["num_env_steps_sampled"]) for one in results]


def skrl(ours):
    """skrl's A2C with its sequential trainer, on gym.make_vec's async envs."""
    from skrl.agents.torch.a2c import A2C
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer

    class Policy(CategoricalMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = torch.nn.Linear(4, 2)

        def compute(self, inputs, role=""):
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = torch.nn.Linear(4, 1)

        def compute(self, inputs, role=""):
            return self.net(inputs["observations"]), {}

    with installed(ours):
        envs = wrap_env(gym.make_vec(ID, NUM_ENVS, vectorization_mode="async"))
        envs._env.reset(seed=1)
        spaces = {
            "observation_space": envs.observation_space,
            "action_space": envs.action_space,
            "device": envs.device,
        }
        models = {"policy": Policy(**spaces), "value": Value(**spaces)}
        memory = RandomMemory(memory_size=16, num_envs=NUM_ENVS, device=envs.device)
        cfg = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
        agent = A2C(models=models, memory=memory, cfg=cfg, **spaces)
        cfg = {"timesteps": 200, "disable_progressbar": True, "headless": True}
        SequentialTrainer(env=envs, agents=agent, cfg=cfg).train()
    return weights(models["policy"]) + weights(models["value"])


def agilerl(ours):
    """AgileRL's make_vect_envs, and DQN learning from what they return."""
    from agilerl.utils.utils import make_vect_envs

    with installed(ours):
        envs = make_vect_envs(ID, num_envs=NUM_ENVS)
        envs.action_space.seed(1)
        results = [envs.reset(seed=1)]
        results += [envs.step(envs.action_space.sample()) for _ in range(100)]
        envs.close()
    return results


def tianshou(ours):
    """Tianshou's Collector, on the class named; what its buffer has."""
    from tianshou.algorithm.random import MARLRandomDiscreteMaskedOffPolicyAlgorithm
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import SubprocVectorEnv

    from shmvec.adapters.tianshou import TianshouVectorEnv

    with installed(False):
        cls = TianshouVectorEnv if ours else SubprocVectorEnv
        envs = cls([lambda: gym.make(ID)] * NUM_ENVS)
        envs.seed(1)
        policy = MARLRandomDiscreteMaskedOffPolicyAlgorithm(
            action_space=envs.action_space[0]
        ).policy
        collector = Collector(policy, envs, VectorReplayBuffer(800, NUM_ENVS))
        collector.reset(gym_reset_kwargs={"seed": 1})
        collector.collect(n_step=400, random=True)
        buffer = collector.buffer
        kept = [
            np.asarray(getattr(buffer, key))
            for key in ("obs", "act", "rew", "terminated", "obs_next")
        ]
        envs.close()
    return kept


PROGRAMS = {
    "CleanRL-shaped PPO": cleanrl,
    "TorchRL": torchrl,
    "RLlib": rllib,
    "skrl": skrl,
    "AgileRL": agilerl,
    "Tianshou": tianshou,
}
