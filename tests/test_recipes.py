"""The recipes run, are short, and do what they promise."""

import os
import pickle
import re
import runpy
import stat
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from equality import same

import shmvec

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
PROGRAMS = sorted(RECIPES.glob("*.py"))


def begin(name, *arguments, **options):
    command = [sys.executable, str(RECIPES / name), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


def run(name, *arguments, **options):
    """Run a recipe; return what it prints."""
    program = begin(name, *arguments, **options)
    out, err = program.communicate(timeout=250)
    assert program.returncode == 0, err
    return out


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert text.count("\n") <= 60
    assert f"    python examples/recipes/{path.name}" in text.split('"""')[1]


def test_every_recipe_is_on_the_page():
    page = (ROOT / "docs" / "recipes.md").read_text()
    linked = re.findall(r"\]\(\.\./examples/recipes/([\w.]+)\)", page)
    assert sorted(set(linked)) == sorted(path.name for path in RECIPES.iterdir() if path.is_file())


def test_episode_statistics_are_the_same_around_each_env_and_around_all():
    episodes, speeds = run("episode_statistics.py").splitlines()  # it compares them itself
    count, mean = numbers(episodes)
    assert count > 500 and 20 < mean < 25
    assert len(numbers(speeds)) == 2


@pytest.mark.parametrize("options", [[], ["--all"]], ids=["one", "all"])
def test_videos_are_of_one_env_or_of_all(options, tmp_path):
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    if not hasattr(gym.wrappers.vector, "RecordVideo"):
        pytest.skip("this Gymnasium records no vector envs")
    from moviepy import VideoFileClip

    folder = tmp_path / "videos"
    videos = run("record_video.py", "--folder", folder, *options).split()
    assert len(videos) > 1 and sorted(map(str, folder.glob("*.mp4"))) == videos
    with closing(VideoFileClip(videos[0])) as clip:
        assert clip.size == ([1200, 800] if options else [600, 400])


def test_normalising_statistics_are_saved_and_loaded(tmp_path):
    lines = run("normalize.py", "--folder", tmp_path / "statistics").splitlines()
    mean, std = numbers(lines[0])
    assert mean < 0.5 and 0.5 < std < 1.5
    with np.load(tmp_path / "statistics" / "observations.npz") as saved:
        assert saved["mean"].shape == (3,) and f"{saved['count']:.0f} observations" in lines[1]
        envs = gym.wrappers.vector.NormalizeObservation(shmvec.make_vec("Pendulum-v1", 2))
        with closing(envs):
            runpy.run_path(str(RECIPES / "normalize.py"))["load"](
                tmp_path / "statistics" / "observations.npz", envs.obs_rms
            )
            envs.update_running_mean = False
            raw, _ = envs.env.reset(seed=3)
            normalised, _ = envs.reset(seed=3)
        expected = (raw - saved["mean"]) / np.sqrt(saved["var"] + 1e-8)
    assert (normalised == expected.astype(np.float32)).all()


def test_stacked_frames_show_velocities():
    without, with_them = run("frame_stacking.py").splitlines()
    assert numbers(with_them)[0] > 2 * numbers(without)[0]
    make_stacked = runpy.run_path(str(RECIPES / "frame_stacking.py"))["make_stacked"]
    with shmvec.ShmVectorEnv([make_stacked] * 3) as envs:
        stacks, _ = envs.reset(seed=1)
        assert (stacks == stacks[:, :1]).all()
        resets = np.zeros(3, bool)
        for _ in range(60):
            following, _, terminations, truncations, _ = envs.step([0, 1, 1])
            assert (following[~resets, :-1] == stacks[~resets, 1:]).all()
            assert (following[resets] == following[resets, :1]).all()
            stacks, resets = following, terminations | truncations


def test_atari_preprocessing():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    shape, scores = run("atari_preprocessing.py", "--num-envs", 2, "--steps", 60).splitlines()[-2:]
    assert shape.startswith("(2, 4, 84, 84) uint8")
    assert "episodes, mean score" in scores


def advantages_by_definition(env, policy, value, steps):
    """Advantages in one env, which is reset by hand: sums of errors until the episode ends."""
    advantages, errors = [], []
    observation, _ = env.reset(seed=1)
    for step in range(steps):
        following, reward, terminated, truncated, _ = env.step(int(policy(observation)))
        expected = 0.0 if terminated else value(following)
        errors.append(reward + 0.99 * expected - value(observation))
        observation = following
        if terminated or truncated or step == steps - 1:
            for first in range(len(errors)):
                weighted = [(0.99 * 0.95) ** k * error for k, error in enumerate(errors[first:])]
                advantages.append(sum(weighted))
            errors = []
            observation, _ = env.reset()
    return advantages


@pytest.mark.parametrize(
    ("collect", "mode", "limit"),
    [("by_rollout", "NextStep", 7), ("by_steps", "NextStep", 50), ("by_steps", "SameStep", 7)],
)
def test_advantages_are_those_of_a_plain_loop(collect, mode, limit):
    recipe = runpy.run_path(str(RECIPES / "gae.py"))
    make = partial(gym.make, "CartPole-v1", max_episode_steps=limit)

    def policy(observations):
        return (observations[..., 2] > 0).astype(int)

    # CartPole truncates and terminates; the seeds of one env are those of the plain loop.
    with shmvec.ShmVectorEnv([make] * 3, num_workers=2, autoreset_mode=mode) as envs:
        advantages, valid = recipe[collect](envs, policy)
    assert valid.all() == (mode == "SameStep")
    with closing(make()) as env:
        expected = advantages_by_definition(env, policy, recipe["value"], valid[:, 0].sum())
    assert np.allclose(advantages[valid[:, 0], 0], expected, rtol=1e-5)


def test_a_resumed_run_has_the_results_of_an_uninterrupted_one(tmp_path):
    whole, resumed = tmp_path / "whole.pickle", tmp_path / "resumed.pickle"
    expected = run("checkpoint.py", "--file", whole).splitlines()
    assert len(expected) == 10
    crash = f"""if True:
        import builtins, os, runpy, sys
        builtins.print = lambda text, **_: text.startswith("step 300:") and os.kill(os.getpid(), 9)
        sys.argv = ["checkpoint.py", "--file", {str(resumed)!r}]
        runpy.run_path({str(RECIPES / "checkpoint.py")!r}, run_name="__main__")
    """
    assert subprocess.run([sys.executable, "-c", crash]).returncode == -9
    assert run("checkpoint.py", "--file", resumed).splitlines() == expected[3:]
    (*_, ours, _), (*_, theirs, _) = (pickle.loads(file.read_bytes()) for file in (resumed, whole))
    assert (ours == theirs).all()  # observations


def pong():
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", repeat_action_probability=0.0)


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (partial(gym.make, "Blackjack-v1"), "numpy"),
        (partial(gym.make, "Ant-v5", max_episode_steps=30), "mujoco imageio"),
        (pong, "ale_py"),
    ],
    ids=["Blackjack", "Ant", "Pong"],
)
def test_snapshots_hold_all_that_an_env_needs(make, needs):
    for module in needs.split():
        pytest.importorskip(module)
    with_snapshot = runpy.run_path(str(RECIPES / "checkpoint.py"))["WithSnapshot"]
    env_fns = [lambda: with_snapshot(make())] * 2
    options = {"num_workers": 2, "autoreset_mode": "SameStep"}
    with shmvec.ShmVectorEnv(env_fns, **options) as envs:
        envs.action_space.seed(1)
        actions = [envs.action_space.sample() for _ in range(100)]
        envs.reset(seed=1)
        for action in actions[:40]:
            envs.step(action)
        snapshots = pickle.loads(pickle.dumps(envs.call("snapshot")))
        expected = [envs.step(action)[:4] for action in actions[40:]]
    with shmvec.ShmVectorEnv(env_fns, **options) as envs:
        envs.reset(seed=2)
        for env, snapshot in enumerate(snapshots):
            envs.call_some([env], "restore", snapshot)
        for action, results in zip(actions[40:], expected, strict=True):
            assert same(envs.step(action)[:4], results)


def test_a_curriculum_gets_harder_and_is_mastered():
    difficulties, lengths = np.reshape(numbers(run("curriculum.py")), (-1, 2)).T
    assert (np.diff(difficulties) >= 0).all() and (difficulties[0], difficulties[-1]) == (0.05, 0.2)
    assert lengths[0] < 30 and lengths[-1] > 70


def test_replayed_levels_are_those_that_score_high():
    first, later = np.reshape(numbers(run("level_replay.py")), (2, 2))
    assert first[0] == 50 and later[0] > 500
    assert later[1] < 0.7 * first[1]  # the pole falls earlier in these


def test_each_level_is_played_as_its_seed_says():
    recipe = runpy.run_path(str(RECIPES / "level_replay.py"))
    options = {"wrappers": [recipe["Levels"]], "max_episode_steps": 50}
    with shmvec.make_vec("CartPole-v1", 4, autoreset_mode="SameStep", **options) as envs:
        played = recipe["play"](envs, lambda seen: (seen[:, 2] > 0).astype(int), 500, num_levels=9)
    with shmvec.make_vec("CartPole-v1", 9, num_workers=0, **options) as envs:
        observations, _ = envs.reset(seed=list(range(9)))
        ages, over = np.zeros(9, int), np.zeros(9, bool)
        while not over.all():
            ages += ~over
            observations, _, *ends, _ = envs.step((observations[:, 2] > 0).astype(int))
            over |= ends[0] | ends[1]
    assert len(played) > 40 and all(ages[level] == length for level, length in played)


@pytest.mark.parametrize("options", [[], ["--optuna"]], ids=["random", "optuna"])
def test_a_search_finds_hyper_parameters(options):
    if options:
        pytest.importorskip("optuna")
    score, deviation, noise = numbers(run("hyperparameters.py", *options).splitlines()[-1])
    assert 100 < score <= 500 and 0.1 <= deviation <= 3 and 0 <= noise <= 0.5


SRUN = """#!/bin/sh
# In the place of Slurm's: a task with what it is asked for.
test "$1 $2" = "--cpus-per-task=2 --cpu-bind=cores" || exit 1
shift 2
exec "$@"
"""


def test_slurm_gets_as_many_workers_as_cpus(tmp_path):
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert options["ntasks"] == "1" and int(options["cpus-per-task"]) > 1
    for name, program in ("srun", SRUN), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(stat.S_IRWXU)
    slurm = {"SLURM_CPUS_PER_TASK": "2", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "17"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", script],
        cwd=ROOT,
        env={**os.environ, **slurm, "PATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    workers = min(2, len(os.sched_getaffinity(0)))
    assert f"job 17: {workers} workers" in done.stdout and "seed 3: reward" in done.stdout


def test_slurm_program_runs_without_slurm():
    environ = {**os.environ, "SLURM_CPUS_PER_TASK": "1"}  # less than the affinity
    out = run("slurm.py", "--steps", 20, "--num-envs", 4, env=environ)
    assert ": 1 workers" in out and "seed 1: reward" in out


def test_the_image_has_all_that_is_built_and_no_root():
    lines = (RECIPES / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = "FROM RUN COPY USER WORKDIR ENTRYPOINT CMD".split()
    assert {step for step, _ in steps} <= set(known)
    assert [value for step, value in steps if step == "USER"] == ["runner"]
    copied = [
        source
        for step, value in steps
        if step == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    built = {path.name for path in ROOT.iterdir()} & {"pyproject.toml", "setup.py", "src", "csrc"}
    assert built <= set(copied)
    assert ["ENTRYPOINT", '["tini", "--"]'] in steps


def test_wandb_logs_offline(tmp_path):
    pytest.importorskip("wandb")
    environ = {**os.environ, "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    environ.pop("WANDB_MODE", None)
    out = run("wandb_logging.py", "--iterations", 3, cwd=tmp_path, env=environ)
    assert "3 rows in" in out
    (recorded,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    text = recorded.read_bytes()
    assert all(key in text for key in (b"episode/return", b"episode/length", b"steps_per_second"))
