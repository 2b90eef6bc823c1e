"""``python -m shmvec top``: running vector envs, looked at from outside."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from envs import Counter
from processes import gone
from tables import deep

from shmvec import FaultPolicy, ShmVectorEnv
from shmvec.__main__ import main
from shmvec._commands.attaching import Watcher, find

HERE = str(os.getpid())
LONG = partial(Counter, 50)


def seen(capsys, *arguments):
    """What is said of all vector envs, as JSON."""
    status = main(["top", *map(str, arguments), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if printed["vector_envs"] else 1), printed
    # Of all processes there may be others that damage theirs.
    assert not arguments or not printed["problems"], printed
    return printed["vector_envs"]


@contextmanager
def stepped(num_workers=2, steps=5, make=LONG, **options):
    with closing(ShmVectorEnv([make] * 4, num_workers=num_workers, **options)) as envs:
        envs.reset()
        for _ in range(steps):
            envs.step([0] * 4)
        yield envs


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_it_says_what_stats_say(num_workers, capsys):
    with stepped(num_workers) as envs:
        before = envs.stats().parent.requests
        (row,) = seen(capsys, HERE)
        stats = envs.stats()
    assert row["pid"] == int(HERE) and row["number"] >= 1 and "python" in row["command"]
    shown = row["stats"]
    # Idle workers are asked to doze at some moment.
    assert 0 < before <= shown["parent"]["requests"] <= stats.parent.requests
    assert [w["steps"] for w in shown["workers"]] == [w.steps for w in stats.workers]
    assert [env["step"]["count"] for env in shown["envs"]] == [5] * 4
    assert shown["envs"][3]["reset"]["buckets"] == list(stats.envs[3].reset.buckets)
    assert (shown["num_workers"], shown["cores"]) == (num_workers, stats.cores)
    assert 0 < shown["elapsed_s"] <= stats.elapsed_s and row["steps_per_s"] > 0
    assert 0 < row["share_of_limit"] < 5 and row["verdict"]["kind"]
    assert "recent" not in row
    assert [each["pid"] for each in shown["processes"]] == [each.pid for each in envs.processes]
    assert all(0 < each["pss"] <= each["rss"] for each in [*shown["processes"], shown["caller"]])
    assert shown["caller"]["pid"] == int(HERE) and shown["shared"] > 4096
    envs_of = [(worker["first_env"], worker["num_envs"]) for worker in shown["workers"]]
    assert envs_of == ([(0, 2), (2, 2)] if num_workers else [(0, 4)])


@pytest.mark.deep
def test_faults_and_what_was_done_before_a_restart(capsys):
    policy = FaultPolicy(on_crash="restart", max_restarts=2, backoff_s=0)
    with stepped(faults=policy) as envs:
        before = envs.processes[1].pid
        envs.processes[1].kill()
        envs.step([0] * 4)
        envs.step([0] * 4)
        (row,) = seen(capsys, HERE)
        shown, stats = row["stats"], envs.stats()
    assert 0 < shown["faults"].pop("restart_s") == stats.faults.restart_s < stats.elapsed_s
    assert shown["faults"] == {"crashes": 1, "errors": 0, "timeouts": 0, "restarts": 1, "resets": 0}
    assert [w["steps"] for w in shown["workers"]] == [w.steps for w in stats.workers] == [14, 10]
    assert before not in [each["pid"] for each in shown["processes"]]


@pytest.mark.deep
def test_several_vector_envs_and_those_that_are_closed(capsys):
    with stepped(num_workers=0):
        pass  # a process's first vector env is shown without its number
    with stepped(steps=1) as first, stepped(num_workers=0, steps=2, copy=False) as second:
        rows = seen(capsys, HERE)
        assert rows[1]["number"] == rows[0]["number"] + 1
        assert [each["stats"]["num_workers"] for each in rows] == [2, 0]
        assert {each["pid"] for each in seen(capsys)} >= {int(HERE)}
        observations = second.step([0] * 4)[0]
        second.close()
        assert len(seen(capsys, HERE)) == 1 and observations.shape == (4, 4)  # the memory is there
        assert main(["top", HERE]) == 0
        text = capsys.readouterr().out
        assert (
            text.startswith(f"process {HERE}, vector env ")
            and "4 steps (" in text
            and "idle" not in text
        )
        numbers = [each["number"] for each in rows]
        with stepped(num_workers=0):  # one that is left keeps its number, and no other gets it
            later = [each["number"] for each in seen(capsys, HERE)]
            assert later == [numbers[0], numbers[0] + 2]
        first.close()
        assert not seen(capsys, HERE)
        assert main(["top", HERE]) == 1
        assert f"process {HERE} has no vector env" in capsys.readouterr().err


def test_workers_and_forks_of_a_process_are_not_further_ones(capsys):
    with stepped(copy=False) as envs:
        held = envs.step([0] * 4)[0]  # so the fork has the memory, too
        reader, writer = os.pipe()
        fork = os.fork()
        if fork == 0:
            with suppress(BaseException):
                os.close(writer)
                os.read(reader, 1)  # until the test is over
            os._exit(0)
        os.close(reader)
        try:
            for pid in (HERE, envs.processes[1].pid, fork):
                assert [each["pid"] for each in seen(capsys, pid)] == [int(HERE)]
            assert [each["pid"] for each in seen(capsys)].count(int(HERE)) == 1
            envs.step([0] * 4)  # the fork has not closed it
            assert seen(capsys, HERE)[0]["stats"]["envs"][0]["step"]["count"] == held[0, 0] == 7
        finally:
            os.close(writer)
            os.waitpid(fork, 0)


@pytest.mark.deep
def test_a_worker_that_has_died(monkeypatch):
    """A dead worker has no memory, and is in no step; nor has a process that got its id later."""
    with stepped() as envs:
        watch = Watcher(int(HERE))
        (look,) = watch.take_snapshots()
        first, second = envs.processes
        assert [each.pid for each in look.total.processes] == [first.pid, second.pid]
        second.kill()
        assert gone([second.pid], 60)
        (look,) = watch.take_snapshots()
        assert look.total.processes[0].pid == first.pid and look.total.processes[1] is None
        assert re.search(r"^ +1 +2-3 +\? .*no process$", str(look.recent), re.M)

        def read(path, *arguments):
            stranger = path == Path(f"/proc/{second.pid}/stat")  # which has the id by now
            return read_text(Path("/proc/self/stat") if stranger else path, *arguments)

        read_text = Path.read_text
        monkeypatch.setattr(Path, "read_text", read)
        assert watch.take_snapshots()[0].total.processes[1] is None


@pytest.mark.deep
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_may_not_look():
    with stepped():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                os.setgid(65534)
                os.setuid(65534)
                assert find() == ([], [])
                errors = io.StringIO()
                sys.stderr = errors
                assert main(["top", HERE]) == 1
                assert "it is another user's" in errors.getvalue()
                os.write(writer, b"refused")
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader, "rb") as pipe:
            assert pipe.read() == b"refused"


# ---- other processes ----------------------------------------------------------------------------

STEPPING = """
import os, sys, time
sys.path.insert(0, {tests!r})
from functools import partial
from envs import Counter
from shmvec import ShmVectorEnv
{before}
envs = ShmVectorEnv([partial(Counter, 50)] * 4, num_workers=2{options})
envs.reset()
for _ in range(3):
    envs.step([0] * 4)
print(os.getpid(), *[process.pid for process in envs.processes], flush=True)
if sys.stdin.readline() == "step\\n":
    while True:
        envs.step([0] * 4)
envs.close()
print("closed", flush=True)
sys.stdin.readline()
"""
NO_MEMFD = """
def refuse(*_):
    raise OSError(38, "no memfds here")
os.memfd_create = refuse
"""


@contextmanager
def another(before="", options="", prefix=()):
    """A process that steps a vector env, and the ids of it and its workers."""
    code = STEPPING.format(tests=str(Path(__file__).parent), before=before, options=options)
    pids = []
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            pids += map(int, process.stdout.readline().split())
            yield process, pids
        finally:
            process.kill()
    if not prefix:  # else they are other processes here
        assert gone(pids, 60)


@pytest.mark.parametrize(
    ("before", "options"),
    [
        ("", ", context='fork'"),
        *deep(
            ("", ", context='spawn'"),
            ("", ", context='forkserver'"),
            (NO_MEMFD, ", context='fork'"),
        ),
    ],
    ids=["fork", "spawn", "forkserver", "no memfd"],
)
def test_another_process(before, options, capsys):
    with another(before, options) as (process, (pid, *workers)):
        process.send_signal(signal.SIGSTOP)  # its help is not needed
        (row,) = seen(capsys, pid)
        process.send_signal(signal.SIGCONT)
        assert row["pid"] == pid == process.pid
        shown = row["stats"]
        assert [each["pid"] for each in shown["processes"]] == workers
        assert [env["step"]["count"] for env in shown["envs"]] == [3] * 4
        assert all(worker["cpu_s"] > 0 for worker in shown["workers"])
        assert pid in [each["pid"] for each in seen(capsys)]
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert not seen(capsys, pid)


def is_possible(*command):
    return shutil.which(command[0]) and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.deep
@pytest.mark.skipif(
    not is_possible("unshare", "--time", "--monotonic", "9999", "--fork", "true"),
    reason="no time namespace can be made",
)
def test_a_clock_of_its_own(capsys):
    prefix = ["unshare", "--time", "--monotonic", "9999", "--fork", "--kill-child"]
    with another(prefix=prefix) as (_, (pid, *_)):
        assert main(["top", str(pid)]) == 1
        assert "has a clock of its own" in capsys.readouterr().err


def is_segment(descriptor):
    return "shmvec" in os.readlink(descriptor)


@pytest.mark.deep
@pytest.mark.skipif(
    not is_possible("unshare", "--pid", "--fork", "true"), reason="no namespace can be made"
)
def test_a_container(capsys):
    """Processes there have other ids than here."""
    with another(prefix=["unshare", "--pid", "--fork", "--kill-child"]) as (unshare, inside):
        (pid,) = map(
            int, Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
        )
        (row,) = seen(capsys, pid)
        outside = [row["pid"], *[each["pid"] for each in row["stats"]["processes"]]]
        assert inside[0] == 1 and outside[0] == pid
        assert len(set(outside)) == 3 and not set(outside) & set(inside)
        assert pid in [each["pid"] for each in seen(capsys)]
        # What only looks has the segment open, too, for reading: another top may be older.
        segment = next(each for each in Path(f"/proc/{pid}/fd").iterdir() if is_segment(each))
        with open(segment, "rb"):
            assert [each["pid"] for each in seen(capsys, pid)] == [pid]


# ---- a terminal ---------------------------------------------------------------------------------


# A group whose parent is unknown cannot be stopped. And nohup has SIGHUP ignored, a
# shell SIGQUIT by what runs in the background, as these tests may.
IN_ITS_GROUP = """
import os, signal, sys, shmvec.__main__
os.setpgrp()
for number in signal.SIGHUP, signal.SIGQUIT:
    signal.signal(number, signal.SIG_DFL)
sys.exit(shmvec.__main__.main(sys.argv[1:]))
"""


def resize(descriptor, columns, rows):
    """A terminal's window."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


@contextmanager
def terminal(*arguments, columns=150, rows=50, **environ):
    """A command on a terminal of its own, and what shows more of what it has written there."""
    pytest.importorskip("rich", reason="the top extra")
    ours, theirs = pty.openpty()
    resize(theirs, columns, rows)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_ITS_GROUP, "top", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environ},
    )
    os.close(theirs)
    written = bytearray()

    def on_screen():
        """Without colours, and that the cursor is hidden."""
        return re.sub(r"\x1b\[([0-9;]*m|\?25l)", "", written.decode(errors="replace"))

    def until(pattern=None, times=1):
        """What it has written, once a pattern is in it so often; without one: in the end."""
        deadline = time.monotonic() + 200
        while pattern is None or len(re.findall(pattern, on_screen())) < times:
            assert time.monotonic() < deadline, on_screen()
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    written.extend(os.read(ours, 1 << 16))
                except OSError:  # it has ended
                    assert pattern is None, on_screen()
                    break
        return on_screen()

    try:
        yield process, until
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(ours)


@pytest.mark.deep
def test_a_terminal_is_redrawn_until_ctrl_c():
    with another() as (process, (pid, *_)):
        process.stdin.write("step\n")
        process.stdin.flush()
        with terminal(pid, "--interval", 0.05) as (top, until):
            text = until(r"\x1b\[H", times=4)
            assert text.startswith("\x1b[?1049h") and f"process {pid}: " in text
            top.send_signal(signal.SIGINT)
            text = until()
            assert top.wait(60) == 0 and f"process {pid}: " in text.split("\x1b[?1049l")[1]
            assert "of the last" in text or "; of that the last" in text


def first_picture(until):
    """The rows of a terminal, once all are drawn."""
    drawn = next(filter(None, until(r"\x1b\[Hprocess", times=2).split("\x1b[H")[1:]))
    return [row.rstrip() for row in drawn.split("\r\n")]


@pytest.mark.deep
def test_a_small_terminal():
    """What matters is there: the verdict whole, and what workers do."""
    with (
        stepped(num_workers=4),
        terminal(HERE, "--interval", 0.05, columns=80, rows=12) as (_, until),
    ):
        rows = first_picture(until)
    assert max(map(len, rows)) <= 80 and len(rows) == 12
    table = next(at for at, row in enumerate(rows) if row.startswith("worker "))
    waited = next(at for at, row in enumerate(rows) if row.startswith("the caller waited"))
    verdict = " ".join(rows[2:waited])
    assert re.search(r"(^| )[a-z -]+: .*\.$", verdict)
    assert rows[table].endswith("  now") and "envs" in rows[table]
    assert re.fullmatch(r"\.\.\. and \d+ more", rows[-1])


@pytest.mark.deep
def test_a_terminal_is_left_as_it_was():
    with stepped(num_workers=0), terminal(HERE, "--interval", 0.05) as (top, until):
        until(r"\x1b\[H", times=2)
        top.send_signal(signal.SIGTERM)
        text = until()
        assert top.wait(60) == 128 + signal.SIGTERM
        assert text.count("\x1b[?1049l") == text.count("\x1b[?25h") == 1


@pytest.mark.deep
def test_a_terminal_where_nothing_is_to_be_seen():
    with terminal(HERE) as (top, until):
        assert "\x1b" not in until()
        assert top.wait(60) == 1 and "has no vector env in use" in top.stderr.read().decode()


@pytest.mark.deep
def test_a_terminal_when_what_it_shows_ends():
    with another() as (process, (pid, *_)), terminal(pid, "--interval", 0.05) as (top, until):
        until(r"\x1b\[H", times=2)
        process.stdin.write("close\n")
        process.stdin.flush()
        text = until()
        assert top.wait(60) == 0 and "It has ended, or was closed." in text


@pytest.mark.deep
@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"JPY_PARENT_PID": "1"}])
def test_where_nothing_can_be_redrawn_it_is_printed_once(environ):
    with stepped(num_workers=0), terminal(HERE, **environ) as (top, until):
        text = until()
        assert top.wait(60) == 0 and "any env's step" in text and "\x1b" not in text


# ---- metrics ------------------------------------------------------------------------------------

SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)\{(?P<labels>([a-z_]+="[^"\\\n]*"(,(?!\})|(?=\})))*)\} (?P<value>\S+)'
)


def parsed(text):
    """Samples of Prometheus' text, by name: (labels, value), after the type of each metric."""
    with suppress(ImportError):
        from prometheus_client.parser import text_string_to_metric_families

        assert list(text_string_to_metric_families(text))
    types, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        base = re.sub("_(bucket|sum|count)$", "", match["name"])
        assert match["name"] in types or types[base] == "histogram"
        labels = dict(re.findall('([a-z_]+)="([^"]*)"', match["labels"]))
        samples.setdefault(match["name"], []).append((labels, float(match["value"])))
    return types, samples


@pytest.mark.deep
def test_prometheus_beside_what_cannot_be_read(capsys):
    damaged = os.memfd_create("shmvec-segment")
    try:
        os.write(damaged, b"garbage" * 10_000)
        with stepped():
            assert main(["top", HERE, "--prometheus"]) == 0
    finally:
        os.close(damaged)
    text, errors = capsys.readouterr()
    _, samples = parsed(text)
    assert len(samples["shmvec_envs"]) == 1 and "cannot be read: it is damaged" in errors


def test_prometheus(capsys):
    with stepped(), stepped(num_workers=0):
        assert main(["top", HERE, "--prometheus"]) == 0
    text = capsys.readouterr().out
    types, samples = parsed(text)
    assert text.endswith("\n") and types["shmvec_worker_steps_total"] == "counter"
    first = int(samples["shmvec_envs"][0][0]["vector_env"])
    whose = [{"pid": HERE, "vector_env": f"{first}", "worker": f"{worker}"} for worker in range(2)]
    whose.append({"pid": HERE, "vector_env": f"{first + 1}", "worker": "0"})
    assert samples["shmvec_worker_steps_total"] == [(whose[0], 10), (whose[1], 10), (whose[2], 20)]
    assert len(samples["shmvec_worker_proportional_bytes"]) == 2
    assert len(samples["shmvec_caller_proportional_bytes"]) == 2
    assert samples["shmvec_worker_envs"][1] == (whose[1] | {"first": "2", "last": "3"}, 2)
    buckets = [
        (each["le"], value)
        for each, value in samples["shmvec_step_seconds_bucket"]
        if each["vector_env"] == f"{first}"
    ]
    bounds, counts = zip(*buckets, strict=True)
    assert list(counts) == sorted(counts) and counts[-1] == 20 and bounds[-1] == "+Inf"
    assert list(map(float, bounds)) == sorted(map(float, bounds)) and float(bounds[0]) == 512e-9
    assert samples["shmvec_step_seconds_count"][0][1] == 20
    assert samples["shmvec_step_seconds_sum"][0][1] > 0
    assert len(samples["shmvec_verdict"]) == 2 and types["shmvec_step_seconds"] == "histogram"


@pytest.mark.deep
def test_the_id_of_a_wrapper_finds_the_program_below_it(capsys):
    body = """
from envs import Counter
from shmvec import ShmVectorEnv
envs = ShmVectorEnv([Counter] * 2, num_workers=2)
envs.reset()
print("ready", flush=True)
input()
envs.close()
"""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{body}"
    shell = ["sh", "-c", '"$@"; exit $?', "sh", "timeout", "--foreground", "250"]
    wrapper = subprocess.Popen(
        [*shell, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert wrapper.stdout.readline() == "ready\n"
        (row,) = seen(capsys, wrapper.pid)
        assert row["stats"]["num_workers"] == 2 and row["pid"] != wrapper.pid
        assert main(["stacks", str(wrapper.pid)]) == 0
        out = capsys.readouterr().out
        assert "worker 0 (env 0), process" in out and "worker 1 (env 1), process" in out
    finally:
        wrapper.communicate("\n", timeout=250)
