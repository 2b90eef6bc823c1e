"""Nodes in this process, on some of which whatever is started is lost."""

from shmvec.cluster.crew import LocalCrew, Lost, Node

TRIED = []  # names of the nodes on which something was started; None: anywhere


class Nodes(LocalCrew):
    """Nodes "a" and "b"; what is started on "b" or anywhere is lost."""

    def __init__(self, options):
        TRIED.clear()

    def nodes(self):
        return [Node(name, f"node {name}", 1.0, 0.0) for name in "ab"]

    def start(self, *args, node, **share):
        TRIED.append(node and node.id)
        member, ticket = super().start(*args, node=node, **share)
        if TRIED[-1] != "a":
            member.make = self.lose
            member.where = lambda: node.name if node else "somewhere"
        return member, ticket

    def lose(self, *_):
        raise Lost("it was unplugged")
