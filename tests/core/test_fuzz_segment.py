"""Whatever is written into the segment, the parent neither crashes nor waits for ever.

Allowed are right results, wrong values in arrays, RuntimeError("the segment is damaged: ...") and a
worker that ends. Each case runs in a process of its own, with a deadline and a limit to its memory.
For longer, by hand, and to repeat a case that failed:

    python tests/core/test_fuzz_segment.py --seconds 600
    python tests/core/test_fuzz_segment.py --scenario texts --seed 17 --cases 1
"""

import argparse
import faulthandler
import json
import mmap
import multiprocessing
import os
import pickle
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest
from segment_map import (
    HEADER,
    LEDGERS,
    LINE,
    Map,
    keep_mappings,
    other_memories,
    until_answered,
)

from shmvec import EnvTimeoutError, FaultPolicy, Replay, ShmVectorEnv, WorkerCrashError
from shmvec._memory.rollout import Rollout

CASE_S = 60  # a case that takes longer hangs
MEMORY = 1 << 30  # bytes that a case may allocate
ROUNDS = 6
CASES = 6  # a scenario; of three, none may be noticed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts on fork and on rlimits")


class Scribbler:
    """Writes nonsense where it hurts."""

    def __init__(self, rng):
        self.map, self.memory, self.rng = WHERE[0], WHERE[0].memory, rng

    def scribble(self, name=None):
        name = name or self.rng.choice(REGIONS)
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            getattr(self, f"in_{name}")()
        return name

    def word(self, offset, size=4):
        """Overwrites a number."""
        rng = self.rng
        old = int.from_bytes(self.memory[offset : offset + size], sys.byteorder)
        new = rng.choice((
            lambda: rng.getrandbits(8 * size),
            lambda: old ^ 1 << rng.randrange(8 * size),
            lambda: old + rng.choice((-1, 1)) * rng.choice((1, 2, 3, 8, 16, 64, 256)),
            lambda: rng.choice((0, 1, 2, 3, 7, 16, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**64 - 1)),
            lambda: rng.choice((0x7FFFFFFE, 0x7FFFFFFD)),
            lambda: old << rng.randrange(1, 9),
        ))()  # fmt: skip
        self.memory[offset : offset + size] = (new % (1 << 8 * size)).to_bytes(size, sys.byteorder)

    def block(self, begin, size):
        """Overwrites some of these bytes."""
        rng, memory = self.rng, self.memory
        length = min(size, rng.choice((1, 1, 2, 4, 8, 16, 64, 256, 4096)))
        at = begin + rng.randrange(size - length + 1)
        source = begin + rng.randrange(size - length + 1)
        memory[at : at + length] = rng.choice((
            lambda: rng.randbytes(length),
            lambda: rng.randbytes(length),
            lambda: bytes(length),
            lambda: b"\xff" * length,
            lambda: memory[source : source + length],  # what was there long ago, perhaps
            lambda: bytes(255 - byte for byte in memory[at : at + length]),
        ))()  # fmt: skip

    def in_header(self):
        self.block(0, HEADER.size)

    def in_bell(self):
        offset, size = self.rng.choice(((0, 4), (4, 4), (8, 8)))
        self.word(self.map.bell + offset, size)

    def in_completion(self):
        offset, size = self.rng.choice(((0, 8), (0, 4), (4, 4), (4, 4), (8, 8)))
        self.word(self.map.completion + offset, size)

    def in_policy(self):
        self.block(self.map.policy, LINE)

    def in_notice(self):
        self.block(self.map.notice, 2 * LINE)

    def in_counters(self):
        self.word(
            self.map.counters + LINE * self.worker() + 8 * self.rng.choice((0, 3, 13, 14, 14)), 8
        )

    def worker(self):
        return self.rng.randrange(self.map.num_workers)

    def in_requests(self):
        self.record_ring(self.map.requests(self.worker()))

    def in_completions(self):
        self.record_ring(self.map.completions(self.worker()))

    def record_ring(self, ring):
        where = self.rng.random()
        if where < 0.2:
            self.word(ring)  # tail
        elif where < 0.3:
            self.word(ring + LINE)  # head
        elif where < 0.4:
            self.block(ring + 2 * LINE, self.map.slot_bytes * self.map.records)
        else:  # one of the last records, or where the next one comes
            slot = self.map.slot(ring, self.rng.choice((0, 1, 1, 1, 2, 3)))
            if self.rng.random() < 0.8:
                self.word(slot + 4 * self.rng.randrange(5))
            else:
                self.block(slot, self.map.slot_bytes)

    def in_infos(self):
        self.byte_ring(self.map.infos(self.worker()), self.map.info_bytes)

    def in_actions(self):
        self.byte_ring(self.map.actions(self.worker()), self.map.action_bytes)

    def byte_ring(self, ring, capacity):
        where = self.rng.random()
        if where < 0.1:
            self.word(ring)
        elif where < 0.15:
            self.word(ring + LINE)
        else:
            messages = self.messages(ring, capacity)
            if not messages:
                self.block(ring + 2 * LINE, capacity)
                return
            begin, size = self.rng.choice(messages)
            if where < 0.6:  # size, tag, env, kind, sequence, ...
                self.word(begin + 4 * self.rng.randrange(min(size, 32) // 4))
            elif where < 0.8:
                self.word(begin + self.rng.randrange(size - 3))
            else:
                self.block(begin, size)

    def messages(self, ring, capacity):
        """Where messages lie that were not read yet: (offset, bytes)."""
        found = []
        tail, position = self.map.get(ring), self.map.get(ring + LINE)
        while 0 < (tail - position) % 2**32 <= capacity and len(found) < 100:
            place = ring + 2 * LINE + position % capacity // 8 * 8
            size = min(
                8 + (self.map.get(place) + 7) // 8 * 8, capacity - position % capacity // 8 * 8
            )
            found.append((place, size))
            position = (position + size) % 2**32
        return found

    def in_slabs(self):
        slabs = self.map.total - self.map.slabs
        if self.rng.random() < 0.2:
            self.word(self.map.slabs + 4 * self.rng.randrange(slabs // 4))
        else:
            self.block(self.map.slabs, slabs)

    def in_everything(self):
        self.block(0, self.map.total)

    def in_others(self):
        """In the memory of a replay, a rollout, a trace, or of large results."""
        memories = other_memories()
        if not memories:
            return self.in_slabs()
        self.memory = self.rng.choice(memories)
        try:
            where = self.rng.random()
            if where < 0.6:  # the counts of a replay, the switch and the first tail of a trace
                self.word(8 * self.rng.randrange(32), 8)
            else:
                self.block(0, min(len(self.memory), 1 << self.rng.randrange(9, 24)))
        finally:
            self.memory = self.map.memory


REGIONS = (
    ["header", "bell", "policy", "notice", "counters", "everything"]
    + ["completion", "requests", "slabs", "actions"] * 2
    + ["completions"] * 4
    + ["others"] * 6
    + ["infos"] * 8
)

# ---- what is fuzzed -----------------------------------------------------------------------------

WHERE = []  # the Map of the segment, made while its header is whole
ORDERS = mmap.mmap(-1, 4096)  # what the envs shall do, whichever process they live in


def order(env, seed):
    """Lets an env scribble in its next step; 0: not."""
    struct.pack_into("=I", ORDERS, 4 * env, seed)


class Opaque:
    """No schema describes it."""

    def __init__(self, payload):
        self.payload = payload


class Scribbling(gym.Env):
    """Samples observations, returns infos of all kinds, and writes over the segment if ordered."""

    def __init__(self, index, observation_space, action_space, infos, nap=0.0):
        self.observation_space, self.action_space = observation_space, action_space
        self.index, self.infos, self.nap = index, infos, nap
        self.observation_space.seed(index)
        self.count = 0

    def _scribble(self):
        seed = struct.unpack_from("=I", ORDERS, 4 * self.index)[0]
        if seed:
            order(self.index, 0)
            Scribbler(random.Random(seed)).scribble()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not WHERE:  # in a worker: the first reset
            WHERE.append(Map())
        self._scribble()
        return self.observation_space.sample(), {"reset": self.count}

    def step(self, action):
        self.count += 1
        repr(action)
        self._scribble()
        if self.nap:
            time.sleep(self.nap)
        over = (self.count + self.index) % 4 == 0
        info = self.infos[(self.count + self.index) % len(self.infos)]
        return self.observation_space.sample(), 1.0, over, False, dict(info)

    def large(self):
        """A large array, and a large pickle around it."""
        self._scribble()
        return np.arange(20_000.0), ["text", 7, {"a": None}] * 10_000


BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
TEXTS = gym.spaces.Dict(
    text=gym.spaces.Text(9, charset="abcé日😀"),
    parts=gym.spaces.Tuple((gym.spaces.Discrete(5), gym.spaces.Text(3), BOX)),
)
UNSIZED = gym.spaces.Tuple((gym.spaces.Sequence(gym.spaces.Discrete(3)), TEXTS))
RICH = (
    {"number": 1, "real": 0.5, "single": np.float32(2), "yes": True, "array": np.arange(6.0)},
    {"text": "déjà vu", "none": None, "nested": {"a": 1, "deeper": {"b": np.ones((2, 3), "i2")}}},
    {"opaque": Opaque([1, "two", {"three": 3.0}]), "number": 7, "bytes": b"bytes" * 9},
    {3: "a key that is no string", "list": list(range(20))},
    {"number": np.int16(3), "pair": (1, 2), "array": np.zeros(6)},
    {},
    {"number": 2, "real": -1.5, "text": "x" * 40},
)


class OwnInfos(ShmVectorEnv):
    """Infos are taken one by one, as the envs have returned them."""

    def _add_info(self, *arguments):
        return super()._add_info(*arguments)


@dataclass
class Scenario:
    drive: str
    num_workers: int = 1
    num_envs: int = 4
    observations: gym.Space = field(default_factory=lambda: BOX)
    actions: gym.Space = field(default_factory=lambda: gym.spaces.MultiDiscrete([3, 4]))
    infos: tuple = RICH
    nap: float = 0.0
    arguments: dict = field(default_factory=dict)
    kind: type = ShmVectorEnv

    def make(self):
        def one(index):
            return lambda: Scribbling(
                index, self.observations, self.actions, self.infos, self.nap * (index % 3)
            )

        return self.kind(
            [one(index) for index in range(self.num_envs)],
            num_workers=self.num_workers,
            context="fork",
            **self.arguments,
        )


MESSAGES = {"shared_memory": False}
LEASED = {"batch_size": 2, "copy": False, "num_buffers": 8}
RESTARTS = {"faults": FaultPolicy("restart", "reset", max_restarts=3, backoff_s=0)}
SCENARIOS = {
    "inline": Scenario("lockstep", 0),
    "inline_messages": Scenario("lockstep", 0, 3, UNSIZED, TEXTS, arguments=MESSAGES),
    "texts": Scenario("lockstep", 0, 3, TEXTS, TEXTS, arguments={"autoreset_mode": "SameStep"}),
    "inline_batches": Scenario("batches", 0, arguments={"batch_size": 2}),
    "worker": Scenario("lockstep", 1, arguments={"autoreset_mode": "SameStep"}),
    "workers": Scenario("lockstep", 2, 5, TEXTS, arguments={"step_timeout": 5.0}),
    "messages": Scenario(
        "lockstep", 2, 3, UNSIZED, TEXTS, arguments={"autoreset_mode": "SameStep", **MESSAGES}
    ),
    "batches": Scenario("batches", 2, 6, TEXTS, nap=1e-4, arguments={"batch_size": 2}),
    "batches_of_messages": Scenario(
        "batches", 1, 4, UNSIZED, TEXTS, arguments={"batch_size": 2, **MESSAGES}
    ),
    "views": Scenario("batches", 2, 4, arguments=LEASED),
    "own_infos": Scenario("lockstep", 1, 3, kind=OwnInfos),
    "batches_of_own_infos": Scenario(
        "batches", 0, 4, TEXTS, arguments={"batch_size": 2}, kind=OwnInfos
    ),
    "rollouts": Scenario("rollouts", 2, 3),
    "others": Scenario("others", 2, 4, arguments={"step_timeout": 5.0}),
    "others_of_restarts": Scenario("others", 2, 4, arguments=RESTARTS),
    "restarts": Scenario("lockstep", 2, 3, TEXTS, arguments=RESTARTS),
    "restarts_in_batches": Scenario("batches", 2, 4, arguments={"batch_size": 2, **RESTARTS}),
}

# ---- one case -----------------------------------------------------------------------------------


class Case:
    """A vector env, and calls to it while somebody scribbles."""

    def __init__(self, scenario, seed):
        self.scenario, self.rng = scenario, random.Random(seed)
        self.outcomes = Counter()
        self.hurt = False  # an exception was raised: from now on any other may be, too
        self.envs = scenario.make()
        WHERE.append(Map())
        self.references = {}
        self.out = set()  # envs that were asked one by one
        self.rollout = self.replay = None
        if scenario.drive == "others":
            priorities = self.rng.choice((None, 0.6))
            self.replay = Replay(
                self.envs, 200, n_step=self.rng.choice((1, 3)), prioritized=priorities, seed=seed
            )
        if scenario.drive == "batches":
            self.out.update(range(scenario.num_envs))
            self.call(self.envs.async_reset, seed=seed % 1000)
            self.out.difference_update(self.call(self.envs.recv)[4]["env_id"].tolist())
        else:
            self.call(self.envs.reset, seed=seed % 1000)
        for _ in range(self.rng.randrange(2, 9)):
            getattr(self, f"drive_{scenario.drive}")(None)
        assert not self.outcomes["raised"], "it fails without any damage"

    def run(self):
        kinds = ["before", "during", "answered", "answered", "all along"]
        for _ in range(ROUNDS):
            if self.envs.closed or self.outcomes["raised"] > 2:
                break
            kind = self.rng.choice(kinds)
            getattr(self, f"drive_{self.scenario.drive}")(kind)
            self.outcomes[kind] += 1
            self.call(self.envs.stats)
        if self.rng.random() < 0.3:
            self.scribble()
        if self.replay is not None:
            self.call(self.replay.sample, 100)
        self.envs.close()
        assert not multiprocessing.active_children()
        return self.outcomes

    def scribble(self):
        name = Scribbler(self.rng).scribble()
        self.outcomes[f"in {name}"] += 1

    def call(self, function, *args, **kwargs):
        """Calls, and looks at what comes back."""
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not self.outcomes.total() or not (self.hurt or self.is_clear(error)):
                raise
            self.hurt = True
            self.outcomes["raised"] += 1
            self.outcomes[f"{type(error).__name__}: {str(error)[:90]}"] += 1
            return None
        self.outcomes["returned"] += 1
        walk(result.observations if isinstance(result, Rollout) else result)
        return result

    def is_clear(self, error):
        # (Gymnasium raises OverflowError for a wrong number that does not fit its array.)
        if isinstance(error, (WorkerCrashError, EnvTimeoutError, OverflowError)):
            return True
        if "there is nothing to sample yet" in str(error):  # no record is a step, workers say
            return True
        return type(error) is RuntimeError and str(error).startswith("the segment is damaged: ")

    def vandal(self):
        """A process that scribbles for a while, in one place."""
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                until = time.monotonic() + self.rng.choice((0.001, 0.004))
                scribbler = Scribbler(self.rng)
                name = self.rng.choice(REGIONS)
                while time.monotonic() < until:
                    scribbler.scribble(name)
            os._exit(0)
        return pid

    def around(self, kind, post, finish):
        """A call in two parts, and the damage that is due."""
        vandal = None
        if kind == "before":
            self.scribble()
        elif kind == "during":
            for _ in range(self.rng.choice((1, 1, 2))):
                order(self.rng.randrange(self.scenario.num_envs), self.rng.randrange(1, 2**32))
        elif kind == "all along":
            vandal = self.vandal()
        self.call(post)
        if kind == "answered":
            self.call(self.wait_until_answered)
            self.scribble()
        result = self.call(finish)
        for env in range(self.scenario.num_envs):
            order(env, 0)
        if vandal is not None:
            os.waitpid(vandal, 0)
        return result

    def wait_until_answered(self):
        if LEDGERS:
            until_answered(5.0 if not self.hurt else 0.1)

    def drive_lockstep(self, kind):
        envs, rng = self.envs, self.rng
        what = rng.random()
        if what < 0.8:
            actions = self.actions(self.scenario.num_envs)
            result = self.around(kind, lambda: envs.step_async(actions), envs.step_wait)
            if result is not None:
                self.compare("step", result[:4])
        elif what < 0.9:
            seed = rng.choice((None, 3))
            result = self.around(kind, lambda: envs.reset_async(seed=seed), envs.reset_wait)
            if result is not None:
                self.compare("reset", result[:1])
        elif what < 0.95:
            payload = b"x" * rng.choice((1, 1000, 300_000))
            self.around(
                kind,
                lambda: envs.call_async("set_wrapper_attr", "payload", payload),
                envs.call_wait,
            )
        else:
            mask = np.array([rng.random() < 0.5 for _ in range(self.scenario.num_envs)])
            mask[0] = True
            if rng.random() < 0.5:
                actions = self.actions(self.scenario.num_envs)
                self.around(kind, int, lambda: envs.step(actions, mask=mask))
            else:
                self.around(kind, int, lambda: envs.reset(options={"reset_mask": mask}))

    def drive_batches(self, kind):
        envs, rng = self.envs, self.rng
        at_home = [env for env in range(self.scenario.num_envs) if env not in self.out]
        some = rng.sample(at_home, rng.randrange(len(at_home) + 1))
        if rng.random() < 0.3:
            some = sorted(at_home)
        if len(self.out) + len(some) < envs.batch_size:
            some = at_home

        def post():
            if not some:
                return
            self.out.update(some)
            if rng.random() < 0.2:
                mask = np.zeros(self.scenario.num_envs, bool)
                mask[some] = True
                envs.async_reset(seed=rng.choice((None, 5)), options={"reset_mask": mask})
            else:
                envs.send(self.actions(len(some)), some)

        result = self.around(kind, post, envs.recv)
        if result is not None:
            self.compare("recv", result[:4])
            self.out.difference_update(result[4]["env_id"].tolist())

    def drive_rollouts(self, kind):
        if self.rollout is None or self.rollout.steps == self.rollout.length:
            self.rollout = self.call(self.envs.rollout, 3)
        if self.rollout is not None:
            actions = self.actions(self.scenario.num_envs)
            if self.around(kind, int, lambda: self.rollout.step(actions)) is None:
                self.rollout = None  # it cannot be continued

    def drive_others(self, kind):
        envs, rng = self.envs, self.rng
        what = rng.random()
        if what < 0.2:
            self.around(kind, lambda: envs.call_async("large"), envs.call_wait)
        elif what < 0.4:
            path = os.path.join(tempfile.gettempdir(), f"fuzz-{os.getpid()}.json")
            trace = envs.trace(path, size=64)
            self.call(trace.start)
            actions = self.actions(self.scenario.num_envs)
            self.around(kind, lambda: envs.step_async(actions), envs.step_wait)
            if self.call(trace.stop) or os.path.exists(path):
                with open(path) as file:
                    json.load(file)
                os.unlink(path)
        else:
            self.drive_lockstep(kind)
        if self.call(self.replay.__len__):
            batch = self.call(self.replay.sample, rng.choice((1, 8, 64)))
            if batch is not None:
                walk(list(vars(batch).values()))
            self.call(self.replay.latest)

    def actions(self, count):
        space = gym.vector.utils.batch_space(self.scenario.actions, count)
        space.seed(self.rng.randrange(1000))
        return space.sample()

    def compare(self, name, result):
        """Results look like those before the damage, whatever their values are."""
        look = look_of(result)
        assert self.references.setdefault(name, look) == look, look


def look_of(value):
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        if any(isinstance(part, set) or type(part) is tuple for part in value):
            return type(value)  # a Sequence's value
        return [look_of(part) for part in value]
    if isinstance(value, dict):
        return {key: look_of(part) for key, part in value.items()}
    return type(value)


def walk(value):
    """Touches every byte and every object of a result."""
    if isinstance(value, np.ndarray):
        value = value.copy()  # of a view, which somebody may write to meanwhile
    if not isinstance(value, (dict, tuple, list)):
        repr(value)
        pickle.dumps(value)
    if isinstance(value, str):
        for character in value:
            assert ord(character) <= sys.maxunicode
    elif isinstance(value, dict):
        for key, part in value.items():
            walk(key), walk(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            walk(part)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        for part in value.ravel():
            walk(part)


def run_case(name, seed, report):
    """The main function of a case's process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # in the workers, too
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        with open("/proc/self/statm") as numbers:
            size = int(numbers.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    keep_mappings()
    ORDERS[:] = bytes(len(ORDERS))  # of a case that was killed
    outcomes = Case(SCENARIOS[name], seed).run()
    os.write(report, json.dumps(outcomes).encode())


# ---- many cases ---------------------------------------------------------------------------------


def isolated(name, seed):
    """Runs a case in a process of its own: what came of it, or None if it failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # so that its processes can be ended with it
            os.close(reader)
            run_case(name, seed, writer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    watch = os.pidfd_open(pid)
    try:
        ended = select.select([watch], [], [], CASE_S)[0]
        with suppress(ProcessLookupError):
            if not ended:
                os.killpg(pid, signal.SIGUSR2)
                select.select([watch], [], [], 0.5)  # until they have said where they hang
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        received = os.read(reader, 1 << 16)
    finally:
        os.close(watch)
        os.close(reader)
    if ended and status == 0 and received:
        return Counter(json.loads(received))
    print(
        f"FAILED: --scenario {name} --seed {seed} --cases 1: "
        + (f"exit status {os.waitstatus_to_exitcode(status)}" if ended else "it hangs"),
        file=sys.stderr,
    )
    return None


def main():
    global CASE_S
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each scenario")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--deadline", type=float, default=CASE_S)
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    CASE_S = arguments.deadline
    names = arguments.scenario or list(SCENARIOS)
    cases = arguments.cases
    if cases is None:
        cases = CASES if arguments.seconds == float("inf") else sys.maxsize
    until = time.monotonic() + arguments.seconds
    seed, failed = arguments.seed, 0
    totals = {name: Counter() for name in names}
    while seed < arguments.seed + cases and time.monotonic() < until:
        for name in names:
            outcomes = isolated(name, seed)
            failed += outcomes is None
            totals[name] += outcomes or Counter()
            totals[name]["cases"] += 1
        seed += 1
    if not arguments.quiet:
        for name, outcomes in totals.items():
            print(name)
            for what, count in sorted(outcomes.items()):
                print(f"    {count:7} {what}")
    print(json.dumps({name: outcomes["raised"] for name, outcomes in totals.items()}))
    return 1 if failed else 0


def test_a_few_cases():
    command = [sys.executable, __file__, "--quiet", "--scenario", "workers", "--cases", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("name", SCENARIOS)
def test_damage(name):
    command = [sys.executable, __file__, "--quiet", "--scenario", name, "--cases", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    if name != "rollouts":  # of which less is read
        assert json.loads(done.stdout)[name] > 0, "nothing was noticed: is anything damaged?"


if __name__ == "__main__":
    sys.exit(main())
