"""Seeded mistakes: which tests find each, by default or among the deep ones. Run by hand.

    python tests/mutants.py --list
    python tests/mutants.py --check                       # each can be made, and all of it builds
    python tests/mutants.py --json found.json             # all of them: hours
    python tests/mutants.py --only settle-order

Each mistake is made in a copy of this checkout, which is built and runs the tests that cover its
place, with -x: first those that run by default, then the deep ones. A hang counts as found. A
failure counts only if its test passes without the mistake. With --whole, those that survive meet
all tests.

Of code that has moved, port the mistake: the same thing done wrong where it is done now. Half of
them are mends of the history, undone in today's words (the commit stands beside them); half were
written without having read the tests of their place. No library does this: mutmut and cosmic-ray
change Python only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_S = 1800.0
MARKS = {"default": "not deep", "deep": "deep"}
LEFT_OUT = (".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__")

# "= name file commit" ("-": made up), a promise and the tests that cover its place, what stands
# there, once, and what is put in its place; without a line with "+" whole lines go.
MISTAKES = r"""
= ring-filler csrc/ring.h 9cc09e6
  damage is refused :: csrc core/test_damage.py -k ring or damage
-        if (place == 0 || ring->pending != ring->capacity - place)
+        if (place == 0)

= header-not-renewed csrc/segment.c 29ed4ca
  damage is refused :: csrc core/test_damage.py -k segment or damage
-    sv_segment_format(base, plan); /* the worker may have damaged the header before it died */

= watchdog-still-counted csrc/watchdog.c edf3375
  forks do not warn :: csrc core/test_watchdog.py -k watchdog
-    while (syscall(SYS_tgkill, watchdog.owner, watchdog.thread_id, 0) == 0)
+    while (watchdog.owner == 0)

= busy-time-at-end csrc/counters.h e3f2437
  time limits hit only what is late :: csrc test_time_limits.py -k counters or limits
-    if (busy != 0)
-        atomic_store_explicit(&activity->since, (uint64_t)now, memory_order_relaxed);
+    atomic_store_explicit(&activity->since, (uint64_t)now, memory_order_relaxed);

= waiter-bit-stays csrc/bell.c -
  no system call unless one sleeps :: csrc test_scheduling.py -k bell or scheduling
-                                                      (before + EPOCH) & ~WAITER,
+                                                      before + EPOCH,

= no-look-before-sleep csrc/wait.c -
  no lost wake :: csrc test_dozing.py -k wait or model or dozing
-    int found = sv_ring_peek(wait->requests); /* between listen and sleep: see bell.h */
+    int found = 0;

= completion-wraps csrc/completion.h -
  no wait without end :: csrc -k completion or model
-    return ((done - target) & UINT32_C(0x7fffffff)) < UINT32_C(0x40000000);
+    return (done - target) < UINT32_C(0x40000000);

= call-within-a-call csrc/guard.h -
  a re-entrant call is refused :: csrc faults/test_calls_within_calls.py -k guard or calls
-                                                   memory_order_relaxed);
-}
-
-/* Whether the call
+                                                   memory_order_relaxed) || none == me;
+}
+
+/* Whether the call

= trace-entry-too-many csrc/trace.h -
  a trace shows what was :: csrc core/test_damaged_traces.py -k trace
-    while (first < count && now - (tail - count + first) >= size)
+    while (first < count && now - (tail - count + first) > size)

= failed-reset-without-seed src/shmvec/_core/caller.pyx bd3d00b
  a lost reset is repeated as it was :: test_fault_policy.py test_evaluation.py
-                if self.entries[env].state in (LOST, FAILED) and self.entries[env].is_user_reset]
+                if self.entries[env].state == LOST and self.entries[env].is_user_reset]

= other-shapes-after-restart src/shmvec/_core/caller.pyx 3716894
  actions are what was given :: test_bad_input.py test_fault_policy.py
-        late_messages = self.write_actions(chosen, actions, base, rollout_frame < 0)
+        late_messages = self.write_actions(chosen, actions, base, rollout_frame < -self.num_broken)

= env-that-there-is-not src/shmvec/_core/caller.pyx a0f4153
  bad input is refused :: test_exchange.py test_bad_input.py
-            self.check_exists(envs[i])
-            if (self.entries[envs[i]].state not in
+            if (self.entries[envs[i]].state not in

= infos-of-the-step-before src/shmvec/_core/caller.pyx -
  messages keep their steps :: core/test_infos.py test_partial.py faults/test_taken.py
-            self.buffers[env].used = 0
+            self.num_nonempty += 0

= missing-wake src/shmvec/_core/caller.pyx -
  no lost wake :: test_partial.py test_some_envs.py test_scheduling.py
-            mask |= c.sv_bell_mask(self.entries[envs[i]].worker)
+            mask = c.sv_bell_mask(self.entries[envs[i]].worker)

= newest-first src/shmvec/_core/caller.pyx -
  a partial batch has those ready for longest :: test_partial.py test_exchange.py
-        env = self.oldest_ready
-        for i in range(size_of(indices)):
-            index_at[i] = env
-            env = self.entries[env].next_ready
+        env = self.newest_ready
+        for i in range(size_of(indices)):
+            index_at[i] = env
+            env = self.entries[env].previous_ready

= seed-not-noted src/shmvec/_core/caller.pyx -
  a restarted env is seeded :: test_fault_policy.py faults/test_restart_faults.py
-                self.last_seeds[env] = env_arguments[0]
+                pass

= stale-seed src/shmvec/_core/caller.pyx -
  a restarted env is seeded :: test_fault_policy.py faults/test_restart_faults.py
-        self.seeds.put(env, NO_ARGUMENTS)  # the worker knows those of the lost reset

= seed-of-a-lost-reset src/shmvec/_core/caller.pyx -
  a lost reset is repeated with its seed and options :: test_reset_settings.py
-        if self.entries[env].operation != COMMAND:
-            self.next_seeds.unmark_used(env)

= seed-used-twice src/shmvec/_core/memory.pyx -
  a seed is for one reset :: test_reset_settings.py
-        if self.flags[env] & (SEEDED | IN_MESSAGE):
-            self.flags[env] |= USED
-        return 0
+        return 0

= settings-of-a-successor src/shmvec/_processes/recovery.py -
  a successor has what was set :: test_reset_settings.py
-        return Resets(resets, self._ledger.settings_of(worker))
+        return Resets(resets, [])

= reset-in-place-of-an-automatic-one src/shmvec/_core/caller.pyx -
  a lost reset is repeated with its seed and options :: test_reset_settings.py
-        if not entry.is_user_reset:
-            self.seeds.mark_automatic(env)

= endless-timeout src/shmvec/_core/caller.pyx 759c820
  a timeout of infinity is none :: test_time_limits.py test_partial.py test_async_calls.py
-        if deadline is not None and deadline < MAX_DEADLINE_S:
+        if deadline is not None:

= last-results-overwritten src/shmvec/_core/caller.pyx -
  a lost env's last observation is kept :: test_fault_policy.py
-                        self.keep_last and self.rows[envs[i]] == row):
+                        self.keep_last and self.previous_rows[envs[i]] == row):

= block-half-leased src/shmvec/_core/memory.pyx -
  an array stays as it is :: test_blocks.py test_leases.py
-        cdef Lease lease = self.lease(block * self.num_envs, self.num_envs)
+        cdef Lease lease = self.lease(block * self.num_envs, self.num_envs - 1)

= info-of-a-failed-env src/shmvec/_core/caller.pyx -
  infos are the env's own :: core/test_infos.py test_gymnasium_faults.py test_fault_points.py
-        self.frames.unlent_block = -1  # the env's row there was not written
-        return self.inbox.discard(env)
+        self.frames.unlent_block = -1  # the env's row there was not written
+        return 0

= type-not-looked-at src/shmvec/_core/messages.pyx -
  infos are as the env returned them :: core/test_infos.py test_equivalence.py
-            if type(<object>value) is not field.type:
-                return False

= byte-order-of-actions src/shmvec/_core/memory.pyx a7dcbc7
  actions are what was given :: core/test_codec.py test_casts.py test_vector_env.py
-        self.dtype = np.dtype(dtype).newbyteorder("=")  # all formats have this byte order
+        self.dtype = np.dtype(dtype)

= final-info-not-copied src/shmvec/_core/worker.pyx -
  results equal Sync's :: test_modes.py test_equivalence.py
-        cdef object final_info = self.copy_value(env, "info", info)
+        cdef object final_info = info

= replay-after-an-error src/shmvec/_core/worker.pyx efeeb53
  a replay has what was stepped :: test_replay.py test_replay_faults.py
-        if self.log is not None:  # the env may have made a part of the step
-            self.log.interrupt(self.first_env + i)

= numbers-that-wrap src/shmvec/_core/messages.pyx -
  messages belong to their requests :: core/test_channel.py
-            if message.is_goodbye or <int32_t>(message.sequence - sequence) > 0:
+            if message.is_goodbye or message.sequence > sequence:

= sums-across-truncations src/shmvec/_core/replay.pyx -
  a replay's batches are right :: test_replay.py test_replay_faults.py
-            if self.kinds[row] & (TERMINATED | TRUNCATED):
-                break
+            if self.kinds[row] & TERMINATED:
+                break

= masked-reset-of-all src/shmvec/_core/caller.pyx -
  results equal Sync's :: test_vector_env.py test_overlap.py
-        while (count < limit and envs[count] == envs[0] + count and envs[count] < end
+        while (count < limit and envs[count] < end

= spin-after-an-error src/shmvec/exchange.py 6490ec9
  no wait spins :: test_exchange.py test_pipeline_in_company.py
-            if ledger.caller_failures:  # then a wait for a number of envs would end at once
+            if False:

= armed-as-if-all-counted src/shmvec/_core/caller.pyx -
  no lost wake of an event loop :: test_fault_points.py -k wake
-        links.resync_count()
+        pass

= dead-not-watched src/shmvec/_processes/wakes.py -
  a death wakes an event loop :: test_aio.py -k dies
-        return self._has_unseen_events
+        return False

= results-by-index src/shmvec/exchange.py -
  results come in the order of envs :: test_some_envs.py test_exchange.py
-        return [results[env].open() for env in order.tolist()]
+        return [results[env].open() for env in sorted(order.tolist())]

= mask-of-all-or-some src/shmvec/vector_env.py -
  an env whose action is None stays :: test_partial.py test_vector_env.py test_mistakes.py
-            mask = np.array([action is not None for action in actions])
+            mask = np.array([bool(action) for action in actions])

= any-option-off-linux src/shmvec/_pure.py -
  options that Gymnasium lacks are refused by name :: test_pure.py
-        if value is None or isinstance(value, (str, int, float, tuple)) and value == default:
+        if value is None or isinstance(value, (str, int, float, tuple)):

= one-restart-too-few src/shmvec/_processes/recovery.py -
  max_restarts is what it says :: test_fault_policy.py
-        if len(recent) > self.policy.max_restarts:
+        if len(recent) >= self.policy.max_restarts:

= fork-ends-workers src/shmvec/_processes/supervisor.py 0284aee
  a fork ends no worker :: test_fault_policy.py faults/test_surroundings.py
-        if self._owner_pid != os.getpid():  # an exception can lead here in a fork of the owner
+        if self.ended:

= close-waits-for-the-new src/shmvec/_processes/supervisor.py 8e443c0
  close ends :: faults/test_closed_meanwhile.py
-            if index not in self._pending_starts and index != self._launching

= socket-is-inherited src/shmvec/_processes/worker.py 90b773e
  a death is noticed at once :: faults/test_deaths.py faults/test_families.py
-        os.set_inheritable(channel.fileno(), False)

= server-of-another-path src/shmvec/_processes/fork_server.py e41e168
  workers import what the program does :: test_starting.py
-variables, shares_imports, tuple(sys.path), *_inherited_settings()
+variables, shares_imports, *_inherited_settings()

= same-numbers-again src/shmvec/_processes/launcher.py -
  a restarted worker draws other numbers :: test_generators.py
-            seeds=worker_seeds(self._generators_state, envs.start, starts),
+            seeds=worker_seeds(self._generators_state, envs.start, 0),

= failure-of-the-first src/shmvec/_processes/host.py -
  an error names its env :: test_gymnasium_faults.py test_faults.py test_spare_envs.py
-                failures.append(self._failure(self.first_env + i, "close", error))
+                failures.append(self._failure(self.first_env, "close", error))

= first-words src/shmvec/_processes/output.py -
  a crash comes with its last words :: faults/test_output.py
-            self._tail = (self._tail + written)[-_TAIL_BYTES:]
+            self._tail = (self._tail + written)[:_TAIL_BYTES]

= result-used-again src/shmvec/_memory/parcels.py -
  an array stays as it is :: test_parcels.py
-                if references > _UNUSED_REFERENCES:
+                if references > _UNUSED_REFERENCES + 1:

= zeros-of-two-signs src/shmvec/_wrappers/transforms.pyx bf05196
  wrappers give the same bits :: test_compiled_wrappers.py test_compiled_wrappers_odd.py
-        if value == highs[i] and signbit(value) != signbit(highs[i]):
-            return False

= space-of-the-class src/shmvec/_wrappers/chain.pyx 4f3124b
  wrappers give the same bits :: test_compiled_wrappers.py test_compiled_wrappers_odd.py
-        if attributes is None or getattr(self.kind, name) is not getattr(_wrapper, name):
+        if attributes is None:

= options-are-shared src/shmvec/exchange.py fed951c
  evaluations are exact :: test_evaluation.py
-            ledger.reset(indices, seeds, prepare_copies(workers, options), **flags)
+            ledger.reset(indices, seeds, options, **flags)

= two-of-one-number src/shmvec/evaluation/suite.py f9df31c
  each env of a suite has its number :: test_suites.py
-            taken = {number for each in [*self.pools, *self._ending] for number in each.numbers}
+            taken = {number for each in self.pools for number in each.numbers}

= failed-though-played src/shmvec/evaluation/call.py 2b849d4
  an env's failure is its own :: test_suites.py
-        if not all(episode.settled for episode in played[name])
+        if True

= extras-of-later-groups src/shmvec/pipeline.py a9d8db5
  rollouts have what was returned :: test_pipeline.py test_pipeline_in_company.py
-        if not self._has_names:
-            self._has_names = True
+        if not self.extras and extras and index == 0:

= wrappers-that-draw src/shmvec/states.py 1c2ecff
  a state gives the same steps :: planning
-            is_random = has_transforms or len(unknown_layers) > 0 or _is_random(layer)
+            is_random = len(unknown_layers) > 0 or _is_random(layer)

= older-state-wins src/shmvec/planning/vector_env.py aeb54a5
  the state set last is the state :: planning
-        if self._last_set_call is call:  # no other state was set meanwhile
-            self._set_current(state)
+        self._set_current(state)

= seed-of-the-row src/shmvec/adapters/sb3.py e06cc19
  an adapter is as its original :: adapters/test_rows.py adapters/test_sb3.py
-        self._seeds = [first + row // count for row in range(self.num_envs)]
+        self._seeds = [first + row for row in range(self.num_envs)]

= agents-are-missing src/shmvec/adapters/pettingzoo.py 2e2adcc
  an adapter is as its original :: adapters/test_pettingzoo.py
-            for agent in getattr(self.env, "agents", observations):
+            for agent in self.env.agents:

= limit-hides-the-end src/shmvec/adapters/baselines.py -
  an adapter is as its original :: adapters/test_baselines.py
-                infos[env]["TimeLimit.truncated"] = not terminations[env]
+                infos[env]["TimeLimit.truncated"] = True

= waiting-for-ever src/shmvec/adapters/tianshou.py -
  an adapter is as its original :: adapters/test_tianshou.py adapters/test_contracts.py
-            answered = {*answers.envs.tolist(), *(failure.env for failure in answers.failures)}
+            answered = {*answers.envs.tolist()}

= limit-without-its-word src/shmvec/adapters/actorcritic.py -
  an adapter is as its original :: adapters/test_actorcritic.py
-            if truncated:
-                info["TimeLimit.truncated"] = not terminated
+            if truncated and not terminated:
+                info["TimeLimit.truncated"] = True

= limit-and-end src/shmvec/adapters/ding/_machine.py -
  an adapter is as its original :: adapters/test_ding.py adapters/test_ding_original.py
-            info["TimeLimit.truncated"] = truncated and not terminated
+            info["TimeLimit.truncated"] = truncated

= no-setup-after-close src/shmvec/adapters/plangym/_parallel.py 146d428
  an adapter is as its original :: adapters/test_plangym.py
-        if self._planning is None:
-            self._planning = self._make_planning()
-        self._planning.setup()
+        self._require_planning().setup()

= nodes-write-ours src/shmvec/cluster/evaluation.py d2f55b2
  evaluations are exact :: cluster/test_evaluation_on_nodes.py
-        players.ask(player, "play", [replace(episode, repeats=0) for episode in share])
+        players.ask(player, "play", share)

= latest-may-be-slow src/shmvec/stats.py -
  a verdict names the straggler :: test_verdicts.py
-            means[now.env] = max(means[now.env], now.for_s)
+            means[now.env] = min(means[now.env], now.for_s)

= another-top-is-the-owner src/shmvec/_commands/attaching.py 1f5a5b5
  top shows whose envs these are :: test_top.py
-            if writes and _PATH.fullmatch(os.readlink(path)):
+            if _PATH.fullmatch(os.readlink(path)):
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake: a text of a file, and the one that is put in its place."""

    name: str
    file: str
    commit: str
    promise: str
    tests: list[str]
    words: list[str]
    old: str
    new: str

    def make(self, tree: Path) -> None:
        """Makes it in a copy of the checkout."""
        path = tree / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            sys.exit(f"{self.name}: its place in {self.file} is not there once: port this mistake")
        path.write_text(text.replace(self.old, self.new), "utf-8")


def mistakes() -> list[Mistake]:
    """The mistakes of the table."""
    found = []
    for entry in MISTAKES.strip().split("\n\n= "):
        head, about, *patch = entry.removeprefix("= ").split("\n")
        promise, tests = about.strip().split(" :: ")
        tests, _, words = tests.partition(" -k ")
        old = "\n".join(line[1:] for line in patch if line[0] == "-")
        new = "\n".join(line[1:] for line in patch if line[0] == "+")
        old += "" if any(line[0] == "+" for line in patch) else "\n"
        name, file, commit = head.split()
        files, choice = [f"tests/{each}" for each in tests.split()], ["-k", words] if words else []
        found.append(Mistake(name, file, commit, promise, files, choice, old, new))
    return found


def run(command: list[str], tree: Path, limit_s: float) -> tuple[int | None, str]:
    """Runs a command in a copy; returns its status (None: it took too long) and its output."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, cwd=tree, env=environ, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # its workers end with it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return status, out.read().decode("utf-8", "replace")


def build(tree: Path) -> None:
    """Compiles what is older than its sources."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    status, output = run(command, tree, BUILD_S)
    if status != 0:
        sys.exit(f"{output[-3000:]}\nit does not build")
    where = run([sys.executable, "-c", "import shmvec; print(shmvec.__file__)"], tree, 60.0)[1]
    if not where.startswith(str(tree)):
        sys.exit(f"the tests would import {where.strip()}, which is not the copy")


def copy_tree(source: Path, target: Path) -> None:
    """Makes a tree equal to another one, times of files included; what is equal stays."""
    for path in [*target.rglob("*")]:
        here = path.relative_to(target)
        if path.is_file() and not (source / here).exists() and not {*here.parts} & {*LEFT_OUT}:
            path.unlink()

    def copied(old: str, new: str) -> None:
        before, now = os.stat(old), os.stat(new) if os.path.exists(new) else None
        kept = now is not None and now.st_size == before.st_size
        if not kept or now is None or now.st_mtime_ns != before.st_mtime_ns:
            shutil.copy2(old, new)

    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(source, target, ignore=ignored, copy_function=copied, dirs_exist_ok=True)


def failing(tree: Path, tests: list[str], marks: str, limit_s: float) -> str:
    """The first test that fails; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    status, output = run([*command, *tests], tree, limit_s)
    if status is None:
        return f"none within {limit_s:g} s"
    if status in (0, 5):  # 5: none was chosen
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    return named[1] if named else (output.strip().splitlines() or [f"status {status}"])[-1]


def is_mine(test: str, base: Path, limit_s: float) -> bool:
    """Whether a test that failed, or hung, passes without the mistake."""
    return "::" not in test or not failing(base, [test], "", limit_s)


def tried(
    mistake: Mistake, base: Path, tree: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Makes a mistake, and has its tests look for it."""
    copy_tree(base, tree)
    mistake.make(tree)
    begin = time.monotonic()
    steps = []
    for kind in MARKS:
        if "tests/csrc" in mistake.tests:  # these compile what they need themselves
            steps.append((kind, ["tests/csrc", *mistake.words]))
        others = [each for each in mistake.tests if each != "tests/csrc"]
        steps += [(kind, [*others, *mistake.words])] if others else []
    if options.whole:
        steps += [(f"{kind}, elsewhere", ["tests"]) for kind in MARKS]
    by, found, built = "none", "", False
    for kind, tests in steps:
        if tests[0] != "tests/csrc" and not built:
            build(tree)
            built = True
        limit_s = options.limit * (10 if tests == ["tests"] else 1)
        found = failing(tree, tests, MARKS[kind.partition(",")[0]], limit_s)
        if found and is_mine(found, base, options.limit):
            by = kind
            break
    seconds = round(time.monotonic() - begin, 1)
    return {**asdict(mistake), "found_by": by, "test": found, "seconds": seconds}


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--check", action="store_true", help="make all of them at once, and build")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these")
    parser.add_argument("--whole", action="store_true", help="all tests for those that survive")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="for each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    chosen = [each for each in mistakes() if not options.only or each.name in options.only]
    if options.list or not chosen:
        for each in chosen:
            print(f"{each.name:26} {each.file:44} {each.commit:8} {each.promise}")
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory() as folder:
        base, tree = Path(folder) / "base", Path(folder) / "tree"
        copy_tree(ROOT, base)
        if options.check:
            for each in chosen:
                each.make(base)
            build(base)
            print(f"{len(chosen)} mistakes can be made, and build")
            return 0
        build(base)
        results = []
        for each in chosen:
            result = tried(each, base, tree, options)
            results.append(result)
            print(f"{each.name:26} {result['found_by']:10} {result['test']}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    for promise in sorted({each.promise for each in chosen}):
        of_it = [result["found_by"] for result in results if result["promise"] == promise]
        print(f"{promise}: {', '.join(f'{of_it.count(by)} {by}' for by in sorted(set(of_it)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
