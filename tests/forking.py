"""Scripts, each in a fork of a process that has imported what most of them need.

It is what ``python -c`` would run, in a session of its own; to import all that takes longer than
most scripts. Run as a program, this file is the process that is forked.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types


class Forker:
    """The process that is forked, for the program that has the scripts."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes)

    def begin(self, code, fresh=False):
        """Starts a script, in an interpreter of its own if it is to be fresh."""
        pipes = [os.pipe() for _ in range(3)]
        script = {"code": code, "environ": dict(os.environ), "folder": os.getcwd(), "fresh": fresh}
        message = json.dumps(script)
        try:
            socket.send_fds(self._socket, [message.encode()], [write for _, write in pipes])
        finally:
            for _, write in pipes:
                os.close(write)
        return Script(*(open(read) for read, _ in pipes))

    def close(self):
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Script:
    """A script that runs, with what tests use of `subprocess.Popen`.

    Its id is no other's until `communicate`.
    """

    def __init__(self, stdout, stderr, status):
        self.stdout, self.stderr, self._status = stdout, stderr, status
        self.pid = int(status.readline())
        self.returncode = None

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a script", timeout)
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """What it has written that was not read, once it and all that have its pipes have ended."""
        if self.stdout.closed:
            return "", ""
        said = []
        reader = threading.Thread(target=lambda: said.append(self.stderr.read()), daemon=True)
        reader.start()
        out = self.stdout.read()
        reader.join(timeout)
        self.wait(timeout)
        for pipe in (self.stdout, self.stderr, self._status):
            pipe.close()
        return out, said[0]


def serve(connection):
    """Forks for each script; returns in the fork, with the script."""
    while True:
        message, pipes, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            sys.exit()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        # The caller is not its parent: another fork waits for it, and writes how it has ended.
        if os.fork() == 0:
            status = pipes[2]
            script = os.fork()
            if script == 0:
                return json.loads(message), pipes
            for pipe in pipes[:2]:
                os.close(pipe)
            os.write(status, b"%d\n" % script)
            end = os.waitid(os.P_PID, script, os.WEXITED | os.WNOWAIT)
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            os.write(status, b"%d\n" % code)
            unread = select.poll()
            unread.register(status, 0)
            unread.poll()  # until the caller has closed its end
            os.waitpid(script, 0)
            os._exit(0)
        for pipe in pipes:
            os.close(pipe)


def run(script, pipes):
    """In the fork: from here on a program of its own."""
    for pipe, standard in zip(pipes[:2], (1, 2), strict=True):
        os.dup2(pipe, standard)
    os.closerange(3, 64)
    os.chdir(script["folder"])
    os.setsid()
    if script["fresh"]:
        os.execve(sys.executable, [sys.executable, "-c", script["code"]], script["environ"])
    os.environ.clear()
    os.environ.update(script["environ"])
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    exec(compile(script["code"], "<string>", "exec"), vars(main))


if __name__ == "__main__":  # pytest looks into it for doctests
    import gymnasium  # noqa: F401
    import numpy  # noqa: F401

    import shmvec.evaluation
    import shmvec.pipeline
    import shmvec.planning
    import shmvec.vector_env  # noqa: F401

    connection = socket.socket(fileno=int(sys.argv[1]))
    script_and_pipes = serve(connection)
    connection.detach()
    run(*script_and_pipes)
