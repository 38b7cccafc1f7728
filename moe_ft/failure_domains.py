"""Failure domains beyond the node, such as a rack or a switch: by node, from a file or from SLURM.

planning/placement.py places replicas by them.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_ft.errors import ConfigError

SLURM = "slurm"
_FLAG = "--moe-ft-failure-domain"
_SHOW = ("scontrol", "show", "topology")
_ANSWER_S = 30.0
_LINE = "each line names a node and its domain"
_MOST_NAMED = 3
_BRACKET = re.compile(r"\[([^\]]*)\]")


def find_domains(given: str, nodes: Iterable[str]) -> dict[str, str]:
    """Return the failure domains of a job's nodes.

    Args:
        given: the value of --moe-ft-failure-domain.
        nodes: names of nodes, as moe_ft knows them.

    Raises:
        ConfigError: if the file or SLURM cannot be read, or does not know a node.
    """
    nodes = list(nodes)
    known = domains_of_slurm() if given == SLURM else read_domains(Path(given))
    if unknown := [node for node in nodes if node not in known]:
        names = ", ".join([*unknown[:_MOST_NAMED], *["..."] * (len(unknown) > _MOST_NAMED)])
        remedy = f'Add a line "{unknown[0]} DOMAIN"'
        if given == SLURM:
            remedy = f"Name nodes as SLURM does ({_SHOW[0]}), or write a file: {_LINE}"
        raise ConfigError(
            f"{_FLAG}={given} must give the domain of each node of the job, and does not know {names} "
            f"({len(unknown)} of {len(nodes)}). {remedy}."
        )
    return {node: known[node] for node in nodes}


def read_domains(path: Path) -> dict[str, str]:
    """Return the domain of each node that a file names; text after a # is a comment.

    Raises:
        ConfigError: if it cannot be read, or a line has no node and domain, or a node has two domains.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{_FLAG}={path} cannot be read ({error}): it must be {SLURM}, or a text file, in which {_LINE}. "
            "Name a file that rank 0 can read."
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words and len(words) != 2:
            raise _refusal(path, number, line, _LINE)
        if words and found.setdefault(words[0], words[1]) != words[1]:
            raise _refusal(path, number, line, f"{words[0]} is in {found[words[0]]} already")
    return found


def _refusal(path: Path, number: int, line: str, rule: str) -> ConfigError:
    return ConfigError(f"{_FLAG}={path}: line {number} is {line.strip()!r}: {rule}. Correct it.")


def domains_of_slurm() -> dict[str, str]:
    """Return the leaf switch, or the block, of each node that SLURM knows.

    Raises:
        ConfigError: if it does not answer, knows none, or has a node at two.
    """
    try:
        answer = subprocess.run(
            _SHOW, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(getattr(error, "stderr", "") or error).strip()
        raise _refusal_of_slurm(f"does not answer ({problem})") from error
    found: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = fields.get("BlockName", fields.get("SwitchName", ""))
        if name and fields.get("Level", "0") == "0":
            for node in expand(fields.get("Nodes", "")):
                if found.setdefault(node, name) != name:
                    raise _refusal_of_slurm(f"has {node} at {found[node]} and at {name}")
    if not found:
        raise _refusal_of_slurm("knows no switches and no blocks")
    return found


def _refusal_of_slurm(problem: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG}={SLURM} needs one leaf switch or block for each node, and `{' '.join(_SHOW)}` {problem}. "
        f"Name a file instead: {_LINE}."
    )


def expand(hosts: str) -> Iterator[str]:
    """Yield the names in a list of hosts as SLURM writes it: ``gpu[01-03,7],login`` are five."""
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        yield from _expand_one(word)


def _expand_one(word: str) -> Iterator[str]:
    bracket = _BRACKET.search(word)
    if bracket is None:
        yield word
        return
    for part in bracket[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            name = f"{word[: bracket.start()]}{number:0{len(first)}d}"
            yield from (name + rest for rest in _expand_one(word[bracket.end() :]))
