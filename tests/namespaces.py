"""Nodes with networks of their own on this machine: Linux network namespaces, each on one bridge.

A link can be cut: the node lives then, and hears nobody. Needs root, and `ip` (iproute2).
"""

import os
import shutil
import subprocess
from typing import Self

_BRIDGE, INTERFACE = "bridge", "eth0"
_NETWORK = "10.78.0"
_PROGRAM = shutil.which("ip") or "/usr/sbin/ip"


class Namespaces:
    """Networks of some nodes; they are gone at the end of its context."""

    def __init__(self, *nodes: str) -> None:
        """Make nothing yet.

        Args:
            nodes: names; each gets an address, in their order.
        """
        self._nodes = nodes
        self._prefix = f"moe_ft_{os.getpid()}_"

    def __enter__(self) -> Self:
        hub = self._name("hub")
        try:
            for name in ("hub", *self._nodes):
                _ip("netns", "add", self._name(name))
                _ip("-n", self._name(name), "link", "set", "dev", "lo", "up")
            _ip("-n", hub, "link", "add", _BRIDGE, "type", "bridge")
            _ip("-n", hub, "link", "set", "dev", _BRIDGE, "up")
            for node in self._nodes:
                end = ("name", INTERFACE, "netns", self._name(node))
                _ip("link", "add", *end, "type", "veth", "peer", "name", node, "netns", hub)
                _ip("-n", hub, "link", "set", "dev", node, "master", _BRIDGE)
                own = ("-n", self._name(node))
                _ip(*own, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
                _ip(*own, "link", "set", "dev", INTERFACE, "up")
                self.restore(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("hub", *self._nodes):
            subprocess.run([_PROGRAM, "netns", "delete", self._name(name)], check=False)

    def _name(self, node: str) -> str:
        return self._prefix + node

    def path(self, node: str) -> str:
        """Return the file of a node's namespace, which a process may enter (`os.setns`)."""
        return f"/run/netns/{self._name(node)}"

    def address(self, node: str) -> str:
        return f"{_NETWORK}.{1 + self._nodes.index(node)}"

    def command(self, node: str) -> list[str]:
        """Return the beginning of a command that runs on a node."""
        return [_PROGRAM, "netns", "exec", self._name(node)]

    def cut(self, node: str) -> None:
        """Cut a node off: it lives, what it sends is lost, and nobody tells it."""
        _ip("-n", self._name("hub"), "link", "set", "dev", node, "down")

    def part(self, one: str, other: str) -> None:
        """Lose what two nodes send each other, and tell them nothing: it goes to a card that nobody has."""
        for here, there in ((one, other), (other, one)):
            nowhere = ("lladdr", "02:00:00:00:00:01", "dev", INTERFACE, "nud", "permanent")
            _ip("-n", self._name(here), "neighbor", "replace", self.address(there), *nowhere)

    def join(self, one: str, other: str) -> None:
        """Let two nodes reach each other again."""
        for here, there in ((one, other), (other, one)):
            entry = (self.address(there), "dev", INTERFACE)
            _ip("-n", self._name(here), "neighbor", "delete", *entry)

    def unplug(self, node: str) -> None:
        """Lose all that a node sends and gets; its own kernel sees a link that is up."""
        _ip("-n", self._name("hub"), "link", "set", "dev", node, "nomaster")

    def plug(self, node: str) -> None:
        """Undo `unplug`."""
        _ip("-n", self._name("hub"), "link", "set", "dev", node, "master", _BRIDGE)

    def restore(self, node: str) -> None:
        """Connect a node again."""
        _ip("-n", self._name("hub"), "link", "set", "dev", node, "up")


def why_none() -> str:
    """Return why this machine has no network namespaces; empty if it has."""
    try:
        with Namespaces("probe"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs root, iproute2 and network namespaces: {error}"


def _ip(*words: str) -> None:
    subprocess.run([_PROGRAM, *words], check=True)
