"""What workers print arrives whole, once, at once; their last lines are in errors and records."""

import gc
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from printing import Printing
from scripts import succeeds
from tables import deep, paired

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv, TooManyFaultsError, WorkerCrashError
from shmvec._processes import output
from shmvec._processes.output import excerpt

CONTEXTS = ["fork", "spawn", "forkserver"]
BY_FORK = pytest.mark.parametrize("context", ["fork", *deep("spawn")])
KINDS = ["pipe", "file", "terminal"]
HAS_GIL = not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()
FOLDER = Path(__file__).parent

START = f"""
import os, sys
sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parent)!r}]
from functools import partial
from printing import Printing
from shmvec import FaultPolicy, ShmVectorEnv
"""


def vector_env(count, num_workers, context="fork", faults=None, **does):
    functions = [partial(Printing, number, **does) for number in range(count)]
    envs = ShmVectorEnv(functions, num_workers=num_workers, context=context, faults=faults)
    envs.reset(seed=0)
    return envs


def read_to_the_end(descriptor):
    parts = []
    while True:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError:  # a terminal that is gone
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def printed_to(kind, body, tmp_path, stream="stdout"):
    """What a script prints to a file, a pipe, or a terminal."""
    given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    file = None
    if kind == "file":
        mine, theirs = None, os.open(tmp_path / "printed", os.O_WRONLY | os.O_CREAT)
        file = tmp_path / "printed"
    else:
        mine, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    given[stream] = theirs
    command = [sys.executable, "-c", START + textwrap.dedent(body)]
    # As python -u, which a line is to survive.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1" if kind == "pipe" else ""}
    with subprocess.Popen(command, env=environ, **given) as script:
        os.close(theirs)
        try:
            text = "" if mine is None else read_to_the_end(mine).decode()
            assert script.wait(250) == 0
        finally:
            script.kill()
            if mine is not None:
                os.close(mine)
    return (file.read_text() if file else text).replace("\r\n", "\n")


@pytest.mark.parametrize(
    "where, printed",
    paired(
        [*[("fork", kind) for kind in KINDS], ("spawn", "pipe"), ("forkserver", "terminal")],
        [("stdout", "words"), ("stderr", "error_words")],
    ),
)
def test_lines_are_never_mixed(where, printed, tmp_path):
    (context, kind), (stream, what) = where, printed
    body = f"""
    envs = ShmVectorEnv(
        [partial(Printing, number, step=[{what!r}]) for number in range(6)],
        num_workers=6, context={context!r},
    )
    envs.reset(seed=0)
    for _ in range(20):
        envs.step([1] * 6)
    envs.close()
    """
    lines = printed_to(kind, body, tmp_path, stream).splitlines()
    expected = sorted(" ".join(["<", *[str(n)] * 50, ">"]) for n in range(6) for _ in range(20))
    assert sorted(lines) == expected


@pytest.mark.deep
@pytest.mark.parametrize("what, kind", paired(["c_words", "some_kilobytes"], ["pipe", "file"]))
def test_long_lines_and_those_of_c_are_whole(kind, what, tmp_path):
    body = f"""
    envs = ShmVectorEnv(
        [partial(Printing, number, step=[{what!r}]) for number in range(4)], num_workers=4
    )
    envs.reset(seed=0)
    for _ in range(20):
        envs.step([1] * 4)
    envs.close()
    """
    lines = printed_to(kind, body, tmp_path).splitlines()
    length = 50 if what == "c_words" else 3000
    expected = sorted(" ".join(["<", *[str(n)] * length, ">"]) for n in range(4) for _ in range(20))
    assert sorted(lines) == expected


@pytest.mark.deep
@pytest.mark.parametrize("stand_in", ["sys.stdout", "io.StringIO()", "Tee(sys.stdout)"])
def test_what_the_parent_holds_is_printed_once(stand_in):
    """And what workers print is printed, whatever sys.stdout was."""
    out = succeeds(
        START,
        f"""
        import ctypes, io

        class Tee:
            def __init__(self, stream):
                self.stream = stream
            def write(self, text):
                self.stream.write(text)
            def flush(self):
                pass  # so that what it holds is still there when workers are forked

        libc = ctypes.CDLL(None)
        libc.printf(b"C has this once\\n")
        sys.stdout.reconfigure(write_through=False)  # with PYTHONUNBUFFERED it would hold nothing
        sys.stdout.write("Python has this once\\n")
        original, sys.stdout = sys.stdout, {stand_in}
        original.flush = lambda: None
        envs = ShmVectorEnv(
            [partial(Printing, number, step=["words", "c_words"]) for number in range(2)],
            num_workers=2, context="fork",
        )
        envs.reset(seed=0)
        envs.step([1] * 2)
        envs.close()
        del original.flush
        sys.stdout = original
        libc.fflush(None)
        """,
    )
    lines = out.splitlines()
    assert lines.count("C has this once") == lines.count("Python has this once") == 1
    words = [line for line in lines if line.startswith("< ")]
    assert sorted(words) == sorted(" ".join(["<", *[str(n)] * 50, ">"]) for n in [0, 0, 1, 1])


@BY_FORK
def test_whole_lines_survive_a_kill(context, tmp_path):
    body = f"""
    envs = ShmVectorEnv(
        [partial(Printing, step=["words", "kill"])], context={context!r},
    )
    envs.reset(seed=0)
    try:
        envs.step([1])
    except RuntimeError:
        pass
    """
    assert printed_to("pipe", body, tmp_path).splitlines() == [" ".join(["<", *["0"] * 50, ">"])]


@pytest.mark.deep
def test_pytest_captures_it(capfd):
    envs = vector_env(3, 3, step=["words", "tell"])
    envs.step([1] * 3)
    envs.close()
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [" ".join(["<", *[str(n)] * 50, ">"]) for n in range(3)]
    assert sorted(err.splitlines()) == [f"env {n} in step 1" for n in range(3)]


@pytest.mark.parametrize("context, crash", paired(CONTEXTS, ["segfault", "abort"]))
def test_a_crash_says_where_in_python_it_was(crash, context, capfd):
    envs = vector_env(3, 2, context, step=["tell", crash])
    with pytest.raises(WorkerCrashError) as raised:
        envs.step([0, 0, 1])
    (said,) = raised.value.stderr
    what = "Segmentation fault" if crash == "segfault" else "Aborted"
    head, fatal, thread, *stack = said.splitlines()
    assert (head, fatal) == ("env 2 in step 1", f"Fatal Python error: {what}")
    assert re.match(r"(Current thread|Stack) .*most recent call first", thread)
    assert "printing.py" in stack[-1] and stack[-1].endswith("in step")
    assert textwrap.indent(said, "    ") in str(raised.value)
    assert "The last lines of worker 1 on stderr:" in str(raised.value)
    err = capfd.readouterr().err
    assert err.count("env 2 in step 1\n") == err.count(f"{fatal}\n") == 1


@pytest.mark.deep
@pytest.mark.parametrize(
    "step, fatal, where",
    [
        (["company", "segfault"], "Segmentation fault", "<lambda>"),
        (["abort_in_c_thread"], "Aborted", "abort_in_c_thread"),
    ],
)
def test_a_crash_beside_other_threads_or_in_one_of_c(step, fatal, where):
    envs = vector_env(1, 1, step=step)
    with pytest.raises(WorkerCrashError) as raised:
        envs.step([1])
    head, _, *stack = raised.value.stderr[0].splitlines()
    assert head == f"Fatal Python error: {fatal}"
    functions = [line.rpartition(" in ")[2] for line in stack]
    if where == "abort_in_c_thread" and not HAS_GIL:
        assert "step" not in functions  # faulthandler looks at no other thread without a GIL
    else:
        assert where in functions[:2] and functions[-2:] == ["do", "step"]


@pytest.mark.deep
def test_a_crash_is_known_although_the_env_has_another_stderr(capfd):
    envs = vector_env(1, 1, step=["tell", "redirect_stderr", "segfault"])
    with pytest.raises(WorkerCrashError) as raised:
        envs.step([1])
    (said,) = raised.value.stderr
    assert said.startswith("env 0 in step 1\nFatal Python error: Segmentation fault\n")
    assert said.endswith("in step") and "Segmentation fault" in capfd.readouterr().err


@pytest.mark.deep
def test_the_user_disables_faulthandler(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    import faulthandler

    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    try:
        envs = vector_env(1, 1, step=["segfault"])
        with pytest.raises(WorkerCrashError) as raised:
            envs.step([1])
    finally:
        if enabled:
            faulthandler.enable()
    assert raised.value.stderr == ("",)
    assert "Look at the worker's output above" in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.deep
@BY_FORK
def test_whichever_process_writes_it(context, capfd):
    ways = ["tell_by_python", "tell_by_c", "tell_by_a_program", "half_a_line", "kill"]
    envs = vector_env(1, 1, context, step=ways)
    with pytest.raises(WorkerCrashError) as raised:
        envs.step([1])
    expected = "by Python\nby C\nby a program\nhalf a line"
    assert raised.value.stderr == (expected,)
    assert capfd.readouterr().err == expected


@pytest.mark.deep
@BY_FORK
def test_while_envs_are_built(context, capfd):
    with pytest.raises(WorkerCrashError) as raised:
        vector_env(1, 1, context, make=["tell", "exit"])
    assert "exit code 3" in str(raised.value)
    assert raised.value.stderr == ("env 0 in step 0",)
    assert capfd.readouterr().err == "env 0 in step 0\n"


@pytest.mark.deep
def test_many_at_once(capfd):
    """Nothing is lost of what 16 workers write at last, and each has its own last lines."""
    envs = vector_env(16, 16, step=["much", "tell", "kill"], faults=FaultPolicy(on_crash="restart"))
    infos = envs.step([1] * 16)[-1]
    envs.close()
    said = infos["fault"]["stderr"]
    for number, text in enumerate(said):
        assert text.splitlines()[-1] == f"env {number} in step 1"
        assert len(text.splitlines()) <= 20 and len(text) <= 4096
    lines = Counter(capfd.readouterr().err.splitlines())
    each = [f"env {number} in step 1" for number in range(16)]
    all_alike = [f"line {number}: " + "x" * 300 for number in range(1000)]
    assert lines == {**dict.fromkeys(each, 1), **dict.fromkeys(all_alike, 16)}


@pytest.mark.deep
@BY_FORK
def test_lines_that_workers_write_alike_as_they_start_are_printed_once(context, capfd):
    policy = FaultPolicy(on_crash="restart", backoff_s=0)
    does = ["alike_with_an_empty_line", "tell"]
    envs = vector_env(4, 4, context, make=does, step=[*does, "kill"], faults=policy)
    start = ["a warning", "", *(f"env {number} in step 0" for number in range(4))]
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(start)
    envs.step([1, 1, 0, 0])
    envs.step([0, 0, 0, 0])
    envs.close()
    step = [f"env {number} in step 1" for number in (0, 1)]
    expected = [*["a warning", ""] * 4, *step, *start[2:4]]
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(expected)


@pytest.mark.deep
def test_a_line_that_one_worker_writes_often_is_left_as_it_is(capfd):
    envs = vector_env(4, 1, make=["alike"] * 10)
    envs.close()
    assert capfd.readouterr().err == "a warning\n" * 40


@pytest.mark.deep
def test_all_has_arrived_when_close_returns(capfd):
    for context in CONTEXTS:
        vector_env(4, 2, context, close=["much", "words"]).close()
        out, err = capfd.readouterr()
        assert len(out.splitlines()) == 4 and len(err.splitlines()) == 4000


@pytest.mark.deep
def test_records_of_faults(caplog):
    policy = FaultPolicy(on_crash="restart", max_restarts=2)
    envs = vector_env(4, 2, step=["tell", "kill"], faults=policy)
    infos = envs.step([0, 0, 0, 1])[-1]
    assert infos["fault"]["stderr"].tolist() == [None, None, *["env 3 in step 1"] * 2]
    envs.step([0] * 4)
    assert envs.step([0, 0, 1, 0])[-1]["fault"]["stderr"][2] == "env 2 in step 1"
    envs.step([0] * 4)
    with pytest.raises(TooManyFaultsError) as raised:
        envs.step([0, 0, 1, 0])
    assert [fault.stderr for fault in raised.value.history] == [
        "env 3 in step 1",
        "env 2 in step 1",
        "env 2 in step 1",
    ]
    assert str(raised.value).endswith("    env 2 in step 1")


@pytest.mark.deep
def test_an_env_that_takes_too_long():
    policy = FaultPolicy(on_timeout="restart", step_timeout=1.0, max_restarts=1, backoff_s=0)
    envs = vector_env(1, 1, step=["tell", "hang"], faults=policy)
    infos = envs.step([1])[-1]
    assert infos["fault"]["type"] == ["EnvTimeoutError"]
    assert infos["fault"]["stderr"] == ["env 0 in step 1"]
    envs.step([0])
    with pytest.raises(TooManyFaultsError) as raised:
        envs.step([1])
    late = raised.value.__cause__
    assert isinstance(late, EnvTimeoutError) and late.stderr == "env 0 in step 1"
    assert "The last lines of its worker on stderr:\n    env 0 in step 1" in str(late)


@pytest.mark.deep
def test_ordinary_errors_are_not_printed_twice(capfd):
    envs = vector_env(2, 1, step=["tell", "fail"], faults=FaultPolicy(on_error="restart"))
    infos = envs.step([1, 0])[-1]
    assert infos["fault"]["message"][0] == "an ordinary error"
    assert infos["fault"]["stderr"][0] == ""
    envs.close()
    assert capfd.readouterr().err == "env 0 in step 1\n"
    envs = vector_env(1, 1, step=["fail"])
    with pytest.raises(LookupError) as raised:
        envs.step([1])
    assert raised.value.args == ("an ordinary error",)
    envs.close()
    assert capfd.readouterr().err == ""


@pytest.mark.deep
@pytest.mark.parametrize("what, context", paired(["close_stderr", "redirect_stderr"], CONTEXTS))
def test_an_env_that_has_other_plans_with_its_stderr(context, what, capfd):
    envs = vector_env(1, 1, context, step=["tell", what])
    envs.step([1])
    envs.step([0])
    envs.close()
    assert capfd.readouterr().err == "env 0 in step 1\n"
    envs = vector_env(1, 1, context, step=["tell", what, "kill"])
    with pytest.raises(WorkerCrashError) as raised:
        envs.step([1])
    assert raised.value.stderr == ("env 0 in step 1",)


@pytest.mark.deep
@pytest.mark.parametrize(
    "context, stand_in",
    [
        ("fork", "io.StringIO()"),
        ("fork", "None"),
        ("fork", "open(os.devnull, 'w')"),
        ("spawn", "io.StringIO()"),
    ],
)
def test_a_program_that_has_another_stderr(stand_in, context):
    succeeds(
        START,
        f"""
        import io
        shown, shows = os.pipe()
        os.dup2(shows, 2)
        os.close(shows)
        original, sys.stderr = sys.stderr, {stand_in}
        envs = ShmVectorEnv(
            [partial(Printing, step=["tell", "tell_by_c", "kill"])], context={context!r}
        )
        envs.reset(seed=0)
        try:
            envs.step([1])
        except RuntimeError as error:
            said = error.stderr
        sys.stderr = original
        expected = "env 0 in step 1\\nby C"
        if "devnull" in {stand_in!r} and {context!r} == "fork":
            expected = "by C"  # a file of the program's own
        assert said == (expected,), said
        assert os.read(shown, 1000).decode() == expected + "\\n"
        """,
    )


# By name: what is done to the program's streams.
STREAMS = {
    "no stderr": "os.close(2); sys.stderr = None",
    "nor stdout": "os.close(1); os.close(2); sys.stdout = sys.stderr = None",
    "nor stdin": "os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None",
    "a stderr that is not for writing": "os.dup2(os.open(os.devnull, os.O_RDONLY), 2)",
    "a stderr that is not read": "ends = os.pipe(); os.dup2(ends[1], 2); os.close(ends[0])",
    "a stderr that is full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
}


@pytest.mark.deep
@pytest.mark.parametrize("context, streams", paired(CONTEXTS, STREAMS))
def test_a_program_whose_streams_take_nothing(streams, context):
    """What workers print is remembered, and printing does not wait."""
    does = ["words", "much", "tell", "tell_by_c", "kill"]
    succeeds(
        START,
        f"""
        import signal
        {STREAMS[streams]}
        signal.alarm(60)
        env_fns = [partial(Printing, n, step={does}) for n in range(2)]
        envs = ShmVectorEnv(env_fns, num_workers=2, context={context!r})
        envs.reset(seed=0)
        try:
            envs.step([1, 1])
        except RuntimeError as error:
            said = error.stderr
        ends = tuple(f"\\nenv {{n}} in step 1\\nby C" for n in range(2))
        assert said and all(each.endswith(ends) for each in said), said
        """,
    )


@pytest.mark.deep
def test_a_stderr_that_nobody_reads():
    """It is not waited for, and nothing is lost."""
    out = succeeds(
        START,
        """
        import logging, time
        logging.disable()  # this process would wait
        shown, shows = os.pipe()
        os.set_blocking(shows, False)
        try:
            while True:
                os.write(shows, bytes(1))
        except BlockingIOError:
            pass
        os.set_blocking(shows, True)
        errors = os.dup(2)
        os.dup2(shows, 2)
        envs = ShmVectorEnv(
            [partial(Printing, number, step=["tell", "kill"]) for number in range(8)],
            num_workers=8, context="fork", faults=FaultPolicy(on_crash="restart", backoff_s=0),
        )
        envs.reset(seed=0)
        taken = []
        for _ in range(3):
            began = time.monotonic()
            said = envs.step([1] * 8)[-1]["fault"]["stderr"]
            assert [*said] == [f"env {n} in step 1" for n in range(8)], said
            envs.step([0] * 8)
            child = os.fork()  # which does not wait for the reader either
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            taken.append(time.monotonic() - began)
        envs.close()
        assert min(taken) < 5, "it waits for a second for each of eight"
        text = b""
        while text.count(b"\\n") < 24:
            text += os.read(shown, 1 << 16)
        os.dup2(errors, 2)
        lines = text.lstrip(bytes(1)).decode().splitlines()
        assert sorted(lines) == sorted(f"env {n} in step 1" for n in range(8) for _ in range(3))
        print("all is well")
        """,
    )
    assert "all is well" in out


@pytest.mark.deep
def test_no_worker_waits_while_the_program_holds_the_gil(tmp_path):
    succeeds(
        START,
        f"""
        import ctypes, time
        done = {str(tmp_path / "done")!r}
        os.dup2(os.open({str(tmp_path / "stderr")!r}, os.O_RDWR | os.O_CREAT), 2)
        envs = ShmVectorEnv([partial(Printing, step=["a_long_line"], until=done)], num_workers=1)
        envs.reset(seed=0)
        libc = ctypes.PyDLL(None)
        sys.setswitchinterval(1000)  # or this thread would be asked for the GIL
        envs.step_async([1])
        deadline = time.monotonic() + 100
        while libc.access(done.encode(), 0) != 0:
            assert time.monotonic() < deadline
            libc.usleep(1000)
        envs.step_wait()
        envs.close()
        assert os.fstat(2).st_size == 200_001
        """,
    )


@pytest.fixture
def leads_to():
    """Has this process's stderr lead elsewhere."""
    kept = os.dup(2)
    yield lambda descriptor: os.dup2(descriptor, 2)
    os.dup2(kept, 2)
    os.close(kept)


@pytest.mark.deep
def test_no_rest_of_a_line_is_left_out(leads_to):
    """A piece of a line is printed although its end has not come, and so is that end."""
    shown, shows = os.pipe()
    leads_to(shows)
    os.close(shows)
    with closing(vector_env(2, 2, make=["piece_by_piece"], step=["tell_in_latin_1"])) as envs:
        envs.step([1, 0])
    leads_to(1)
    pieces = re.split(rb"(?<=\n)|(?<=\.\.\.)", read_to_the_end(shown))
    os.close(shown)
    assert Counter(pieces) == {b"loading ...": 2, b" done\n": 2, b"\xe4 \xf6 \xfc\n": 1, b"": 1}


@pytest.mark.deep
def test_long_lines_are_whole_although_the_program_forks_meanwhile(leads_to, monkeypatch):
    """And although what reads them is slow."""
    monkeypatch.setattr(
        output, "PARTIAL_LINE_TIMEOUT_S", 60
    )  # the test may have to wait for a core
    shown, shows = os.pipe()
    leads_to(shows)
    os.close(shows)
    parts = []

    def read():
        while part := os.read(shown, 10_000):
            parts.append(part)
            time.sleep(0.02)

    reader = threading.Thread(target=read)
    with closing(vector_env(2, 2, step=["long_lines"])) as envs:
        reader.start()
        envs.step_async([1, 1])
        for _ in range(60):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        envs.step_wait()
    leads_to(1)
    reader.join()
    os.close(shown)
    lines = Counter((line[:1], len(line), len({*line})) for line in b"".join(parts).splitlines())
    assert lines == {(b"0", 6000, 1): 200, (b"1", 6000, 1): 200}


@pytest.mark.deep
def test_a_flood_is_neither_slow_nor_remembered():
    """While the program computes in Python, too."""
    succeeds(
        START,
        """
        import resource, time
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        envs = ShmVectorEnv([partial(Printing, step=["flood"])], context="fork")
        envs.reset(seed=0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        until = time.monotonic() + 100
        envs.step_async([1])
        while not envs.stats().workers[0].steps:
            assert time.monotonic() < until
            sum(range(1000))
        envs.step_wait()
        envs.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 10_000
        """,
    )


@pytest.mark.deep
@BY_FORK
def test_what_outlives_its_worker_goes_on_writing(context, tmp_path, capfd):
    enough = str(tmp_path / "enough")
    envs = vector_env(1, 1, context, step=["leave_a_process", "kill"], until=enough)
    with pytest.raises(WorkerCrashError):
        envs.step([1])
    (tmp_path / "enough").touch()
    written, deadline = "", threading.Event()
    for _ in range(2000):
        written += capfd.readouterr().err
        if written.endswith("child ends\n"):
            break
        deadline.wait(0.05)
    *lines, last = written.splitlines()
    assert last == "child ends"
    assert lines == [f"child {number}" for number in range(len(lines))]


def descriptors_and_threads(known):
    """How many there are; of threads all but these, of which some may be about to end."""
    return len(os.listdir("/proc/self/fd")), len({*os.listdir("/proc/self/task")} - known)


def wait_until_there_are(expected, known):
    """A thread that has ended may still be listed, or have its descriptors."""
    until = time.monotonic() + 60
    while (found := descriptors_and_threads(known)) != expected:
        assert time.monotonic() < until, (found, expected)
        time.sleep(0.01)


@pytest.mark.deep
def test_few_descriptors_and_one_thread():
    output.pause_copying()  # the thread of an earlier test may be about to end
    gc.collect()
    known = {*os.listdir("/proc/self/task")}
    before = descriptors_and_threads(known)
    policy = FaultPolicy(on_crash="restart", max_restarts=100, backoff_s=0)
    envs = vector_env(4, 4, step=["tell", "kill"], faults=policy)
    during = descriptors_and_threads(known)[0], 1
    wait_until_there_are(during, known)
    for _ in range(5):
        envs.step([1] * 4)
        envs.step([0] * 4)
    wait_until_there_are(during, known)
    envs.close()
    del envs
    gc.collect()  # the process objects of multiprocessing
    wait_until_there_are(before, known)


@pytest.mark.deep
def test_the_parent_forks_without_another_thread():
    succeeds(
        """
        import os
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        counts = []

        def threads():
            return len(os.listdir("/proc/self/task"))

        os.register_at_fork(before=lambda: counts.append(threads()))  # the first is run last
        """,
        START,
        """
        envs = ShmVectorEnv([Printing] * 2, num_workers=2, context="fork")
        envs.reset(seed=0)
        assert threads() == 2
        child = os.fork()
        if child == 0:
            held = [os.readlink(f"/proc/self/fd/{number}") for number in range(3, 64)
                    if os.path.exists(f"/proc/self/fd/{number}")]
            os._exit(any("eventfd" in target for target in held))
        assert os.waitpid(child, 0)[1] == 0
        assert counts == [1, 1, 1], counts
        assert threads() == 2
        envs.step([1] * 2)
        envs.close()
        """,
        fresh=True,
    )


@pytest.mark.deep
def test_excerpt():
    assert excerpt(b"") == ""
    assert excerpt(b"one\ntwo\n\n") == "one\ntwo"
    assert excerpt(b"%d\n" * 100 % tuple(range(100))).splitlines() == [*map(str, range(80, 100))]
    assert excerpt(b"50%\r100%\r\nend") == "50%\n100%\n\nend"
    assert excerpt(b"x" * 1000) == "x" * 199 + "…"
    assert len(excerpt((b"y" * 190 + b"\xc3\xa4\n") * 100).encode()) <= 4096 * 2
    crash = [
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x1 (most recent call first):",
        *[f'  File "other.py", line {n} in other' for n in range(30)],
        "",
        "Current thread 0x2 (most recent call first):",
        '  File "env.py", line 1 in step',
        '  File "/somewhere/shmvec/_processes/worker.py", line 192 in _serve',
        '  File "script.py", line 1 in <module>',
        "",
        "Extension modules: numpy._core._multiarray_umath, ...",
    ]
    for separator in ("\n", ""):  # the env was in the middle of a line: a bar that shows progress
        written = f"before{separator}" + "\n".join(crash)
        assert excerpt(written.encode()).splitlines() == [
            "before",
            "Fatal Python error: Segmentation fault",
            "Current thread 0x2 (most recent call first):",
            '  File "env.py", line 1 in step',
        ]
    # Where a thread of C's has crashed, Python 3.14 tells no Python stack of it, but C's.
    crash[34:] = [
        "Thread 0x2 [python] (most recent call first):",
        *crash[35:38],
        "",
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "/usr/bin/python", at _Py_DumpStack+0x4a [0x499c1d]',
        "",
        crash[-1],
    ]
    assert excerpt("\n".join(crash).encode()).splitlines() == [
        "Fatal Python error: Segmentation fault",
        "Thread 0x2 [python] (most recent call first):",
        '  File "env.py", line 1 in step',
    ]


@pytest.mark.deep
@pytest.mark.parametrize("moment", ["is made", "is started"])
def test_who_is_interrupted_as_the_copying_begins_does_not_end_it_for_others(moment):
    succeeds(f"""
        import threading
        from envs import Counter
        from shmvec import ShmVectorEnv

        class Printing(Counter):
            def step(self, action):
                os.write(2, b"x" * 400_000 + b"\\n")
                return super().step(action)

        class Interrupted(threading.Thread):
            def __init__(self, *arguments, **named):
                super().__init__(*arguments, **named)
                if {moment!r} == "is made":
                    raise KeyboardInterrupt

            def start(self):
                super().start()
                raise KeyboardInterrupt

        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the test reads it only at the end
        real, threading.Thread = threading.Thread, Interrupted
        try:
            ShmVectorEnv([lambda: Printing(99)] * 2, num_workers=1, context="fork")
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        threading.Thread = real
        envs = ShmVectorEnv([lambda: Printing(99)] * 2, num_workers=1, context="fork")
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
        envs.close()
        os.dup2(stderr, 2)
    """)
