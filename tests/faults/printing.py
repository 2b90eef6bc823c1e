"""Envs that print, crash and both: importable, so that spawned workers find them."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np

CRASHES = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
}


class Printing(gym.Env):
    """Does in each step, reset or close what its arguments name."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(100)

    def __init__(self, number=0, make=(), step=(), close=(), until=None):
        self.number, self.on_step, self.on_close, self.until = number, step, close, until
        self.steps = 0
        self.do(make)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if action:
            self.do(self.on_step)
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def close(self):
        self.do(self.on_close)

    def do(self, names):
        for name in names:
            CRASHES[name]() if name in CRASHES else getattr(self, name)()

    def company(self):
        """Threads whose stacks are longer than what is remembered of an output was once."""

        def wait(depth=3):
            wait(depth - 1) if depth else threading.Event().wait()

        for _ in range(50):
            threading.Thread(target=wait, daemon=True).start()

    def abort_in_c_thread(self):
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
        time.sleep(60)

    def words(self):
        """A line that is printed in pieces."""
        print("<", *[self.number] * 50, ">")

    def some_kilobytes(self):
        print("<", *[self.number] * 3000, ">")

    def c_words(self):
        """The same, by C."""
        libc = ctypes.CDLL(None)
        libc.printf(b"< ")
        for _ in range(50):
            libc.printf(b"%d ", self.number)
        libc.printf(b">\n")

    def error_words(self):
        for word in ("<", *[str(self.number)] * 50, ">"):
            os.write(2, word.encode() + (b"\n" if word == ">" else b" "))

    def tell(self):
        print(f"env {self.number} in step {self.steps}", file=sys.stderr)

    def alike(self):
        print("a warning", file=sys.stderr)

    def alike_with_an_empty_line(self):
        sys.stderr.write("a warning\n\n")

    def piece_by_piece(self):
        for piece in (b"loading ...", b" done\n"):
            os.write(2, piece)
            time.sleep(0.5)

    def tell_in_latin_1(self):
        os.write(2, b"\xe4 \xf6 \xfc\n")

    def flood(self):
        """100 MB."""
        for _ in range(25_000):
            os.write(2, b"x" * 3999 + b"\n")

    def tell_by_python(self):
        print("by Python", file=sys.stderr)

    def tell_by_c(self):
        libc = ctypes.CDLL(None)
        libc.dprintf(2, b"by %s\n", b"C")

    def tell_by_a_program(self):
        subprocess.run(["sh", "-c", "echo by a program >&2"], check=True)

    def half_a_line(self):
        sys.stderr.write("half a line")
        sys.stderr.flush()

    def much(self):
        for line in range(1000):
            os.write(2, b"line %d: %s\n" % (line, b"x" * 300))

    def a_long_line(self):
        os.write(2, b"x" * 200_000 + b"\n")
        open(self.until, "w").close()

    def long_lines(self):
        for _ in range(200):
            os.write(2, b"%d" % self.number * 6000 + b"\n")

    def close_stderr(self):
        os.close(2)

    def redirect_stderr(self):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)

    def leave_a_process(self):
        """One that goes on writing, until there is a file, and outlives its worker."""
        unmarked, tells = os.pipe()
        if os.fork() == 0:
            os.setsid()
            # The mark by which it would end with the worker: see docs/reliability.md.
            resource.setrlimit(10, (resource.RLIM_INFINITY, resource.getrlimit(10)[1]))
            os.write(tells, b"!")
            for number in range(10000):
                os.write(2, b"child %d\n" % number)
                time.sleep(0.001 if number < 1000 else 0.02)
                if os.path.exists(self.until):
                    break
            os.write(2, b"child ends\n")
            os._exit(0)
        # Or a worker that crashes next may be gone before the child has rid itself of the mark.
        os.close(tells)
        assert os.read(unmarked, 1) == b"!"
        os.close(unmarked)

    def hang(self):
        time.sleep(100)

    def fail(self):
        raise LookupError("an ordinary error")
