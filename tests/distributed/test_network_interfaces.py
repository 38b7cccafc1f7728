"""--moe-ft-network-interface with one interface for each local rank, on nodes with networks of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
from pathlib import Path
from moe_ft.addresses import own_address
from moe_ft.engine.links.server import PeerServer
rank = {"LOCAL_RANK": sys.argv[1], "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}
server = PeerServer(Path(sys.argv[2]), own_address("moe_ft_b0,moe_ft_b1", rank))
server.start()
server.admit("token")
print(*server.address, flush=True)
sys.stdin.read()
"""
OTHER = """
import sys
from moe_ft.engine.links.peers import PeerConnection
print(bytes(PeerConnection((sys.argv[1], int(sys.argv[2])), "token", 2).get("file")).decode())
"""


def on_node(node: str, *command: str) -> subprocess.Popen[str]:
    words, pipe = ["ip", "netns", "exec", f"moe_ft_{node}", *command], subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)


@pytest.mark.rest
def test_local_ranks_listen_on_their_own_interfaces_alone_and_other_nodes_reach_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("state")
    commands = ["netns add moe_ft_b"]
    for number in (0, 1):
        ends = [("a", 1, f"moe_ft_a{number}"), ("b", 2, f"moe_ft_b{number}")]
        a, b = (f"name {name} netns moe_ft_{node}" for node, _, name in ends)
        commands.append(f"link add {a} type veth peer {b}")
        for node, last, name in ends:
            commands.append(f"-n moe_ft_{node} address add 10.77.{number}.{last}/24 dev {name}")
            commands.append(f"-n moe_ft_{node} link set {name} up")
    if subprocess.run(["ip", "netns", "add", "moe_ft_a"], check=False).returncode:
        pytest.skip("needs root and ip netns")
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        for number in (0, 1):
            rank = on_node("b", sys.executable, "-c", RANK, str(number), str(tmp_path))
            assert rank.stdout is not None
            host, port = rank.stdout.readline().split()
            assert host == f"10.77.{number}.2"
            listening = on_node("b", "ss", "-Hltn").communicate()[0].splitlines()
            assert [line.split()[3] for line in listening] == [f"{host}:{port}"]
            other = on_node("a", sys.executable, "-c", OTHER, host, port)
            assert other.communicate(timeout=120)[0] == "state\n"
            rank.communicate()
    finally:
        for node in ("a", "b"):
            subprocess.run(["ip", "netns", "delete", f"moe_ft_{node}"], check=False)
