"""Envs that use the terminal: their workers are groups of their own, in the background of it."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

BODY = """
import sys, termios
sys.path.insert(0, {folder!r})
from echoing import Echo
from shmvec import ShmVectorEnv

class Telling(Echo):
    def step(self, action):
        with open("/dev/tty", "w") as terminal:
            termios.tcsetattr(terminal, termios.TCSANOW, termios.tcgetattr(terminal))
            terminal.write("told ")
        return super().step(action)

envs = ShmVectorEnv([Telling] * 2, num_workers=2)
envs.reset(seed=0)
envs.step([1, 1])
envs.close()
print("all is well")
"""


def test_an_env_may_set_and_write_to_the_terminal():
    body = BODY.format(folder=str(Path(__file__).parent))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", body])
    said, until = b"", time.monotonic() + 30
    try:
        while b"all is well" not in said:
            assert time.monotonic() < until, said
            if select.select([terminal], [], [], 0.1)[0]:
                said += os.read(terminal, 1000)
        assert said.count(b"told") == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
