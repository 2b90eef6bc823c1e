"""Nodes in this process, on some of which whatever is started is lost."""

from shmvec.cluster.backend import Actor, ActorLostError, LocalBackend, Node

TRIED = []  # names of the nodes on which something was started; None: anywhere


class Unplugged(Actor):
    """An actor that is lost as it starts."""

    def call(self, method, *args):
        raise ActorLostError("it was unplugged")


class Nodes(LocalBackend):
    """Nodes "a" and "b"; what is started on "b" or anywhere is lost."""

    def __init__(self, options):
        TRIED.clear()

    def nodes(self):
        return [Node(name, f"node {name}", 1.0, 0.0) for name in "ab"]

    def start(self, name, node, cpus, gpus):
        TRIED.append(node and node.id)
        return (Actor if TRIED[-1] == "a" else Unplugged)(name)


def lost(backend, call):
    """In place of ``LocalBackend.result``."""
    raise ActorLostError("it was unplugged")
