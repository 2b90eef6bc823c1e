"""Runs a script of CleanRL's with Gymnasium's vector envs and with ours: is the learning the same?

    git clone https://github.com/vwxyzjn/cleanrl
    pip install tyro                                    # beside shmvec and torch
    python tests/upstream/cleanrl.py cleanrl ppo_continuous_action -- --env-id HalfCheetah-v5 \\
        --num-envs 16 --num-steps 512 --total-timesteps 16384

The script's text is run as it is in the checkout, but for what Gymnasium 1 has changed (CHANGES).
Each contender is a process of its own, in turns: SyncVectorEnv, AsyncVectorEnv, the latter after
``shmvec.install()``, and that without compiled wrappers. For each are printed the seconds of the
training loop and their ratio to SyncVectorEnv's of the same turn, as medians of the turns, and a
digest of all that it logs and of the weights. Other digests than SyncVectorEnv's fail.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

CHANGES = {  # of Gymnasium 1; docs/programs.md says which a user makes
    "gym.vector.SyncVectorEnv(": "VectorEnv(",
    "np.clip(obs, -10, 10))": "np.clip(obs, -10, 10), env.observation_space)",
    "wrappers.GrayScaleObservation(": "wrappers.GrayscaleObservation(",
    "wrappers.FrameStack(": "wrappers.FrameStackObservation(",
    'in infos["final_info"]:': "in episodes(infos):",
    'infos["final_observation"]': 'infos["final_obs"]',
}
CONTENDERS = {
    "SyncVectorEnv": None,
    "AsyncVectorEnv": None,
    "installed": {},
    "installed, wrappers in Python": {"compile_wrappers": False},
}


def main():
    """Lets the contenders take turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("script", help="without .py")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--contender", choices=CONTENDERS, help="run by itself, in this process")
    parser.epilog = "What stands after -- is the script's."
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, arguments = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if given.contender:
        print(json.dumps(run(given.checkout, given.script, arguments, given.contender)))
        return 0
    results = {name: [] for name in CONTENDERS}
    for _ in range(given.turns):
        for name, kept in results.items():
            kept.append(in_a_process(given, name, arguments))
    print("| vector env | s | × Sync | digest |\n|---|--:|--:|---|")
    first = results["SyncVectorEnv"]
    for name, kept in results.items():
        seconds = statistics.median(each["seconds"] for each in kept)
        pairs = zip(first, kept, strict=True)
        ratio = statistics.median(sync["seconds"] / each["seconds"] for sync, each in pairs)
        digests = ", ".join(sorted({each["digest"] for each in kept}))
        print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {digests} |")
    return len({each["digest"] for kept in results.values() for each in kept}) > 1


def in_a_process(given, name, arguments):
    """What a run has printed last."""
    command = [sys.executable, __file__, given.checkout, given.script, "--contender", name, "--"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(checkout, script, arguments, contender):
    """Seconds of the training loop, and a digest of what it has logged and learnt."""
    import gymnasium as gym
    import torch

    import shmvec

    torch.set_num_threads(1)
    try:
        import ale_py
    except ImportError:
        pass
    else:
        gym.register_envs(ale_py)
    options = CONTENDERS[contender]
    if options is not None:
        shmvec.install(**options)
    kind = "SyncVectorEnv" if contender == "SyncVectorEnv" else "AsyncVectorEnv"
    mode = gym.vector.AutoresetMode.SAME_STEP
    learnt = hashlib.sha256()
    record_in(learnt)
    path = checkout.resolve() / "cleanrl" / f"{script}.py"
    sys.path.insert(0, str(checkout.resolve()))
    sys.argv = [str(path), "--no-cuda", *arguments]
    text = path.read_text()
    for old, new in CHANGES.items():
        text = text.replace(old, new)
    names = {
        "__name__": "__main__",
        "__file__": str(path),
        "VectorEnv": partial(getattr(gym.vector, kind), autoreset_mode=mode),
        "episodes": episodes,
    }
    exec(compile(text, str(path), "exec"), names)
    seconds = time.time() - names["start_time"]
    modules = [each for each in names.values() if isinstance(each, torch.nn.Module)]
    for parameter in (each for module in modules for each in module.parameters()):
        learnt.update(parameter.detach().numpy().tobytes())
    if not modules:
        raise SystemExit(f"{script} has no network at its top level")
    return {"seconds": seconds, "digest": learnt.hexdigest()[:12]}


def episodes(infos):
    """The infos of episodes that have ended, as Gymnasium 0.29 gave them."""
    ended = infos["_final_info"].nonzero()[0]
    every = infos["final_info"].get("episode")
    return [{"episode": {key: every[key][i] for key in ("r", "l")}} for i in ended if every]


def record_in(learnt):
    """Puts a writer that adds each scalar but times to a digest in TensorBoard's place."""

    class SummaryWriter:
        def __init__(self, *_):
            pass

        def add_text(self, *_):
            pass

        def add_scalar(self, name, value, step):
            if not name.endswith("SPS"):
                learnt.update(f"{name} {float(value)!r} {step}\n".encode())

        def close(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    sys.modules[module.__name__] = module


if __name__ == "__main__":
    sys.exit(main())
