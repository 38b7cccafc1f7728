"""The command line that starts a planned job: what `python -m moe_ft plan` prints to be pasted.

It is the one that was given, or one of torchrun, with what recommended flags need of a launcher: restarts, a
name, and `keep` where ranks are to be replaced. The rules of a start are run over it (plan.py).
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_ft.cluster.link import wants_repair
from moe_ft.cluster.options import TOKEN
from moe_ft.commands.command_line import TrainingCommand, read_agent, read_torchrun
from moe_ft.planning.job_costs import PERSIST_DIR

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_KEEP = ("-m", "moe_ft", "keep")
_PROGRAM = "pretrain_gpt_moe.py"
_NUM_RESTARTS = "20"  # as in examples/slurm
_PORT = 29500
# Words that users replace: of what nobody but them knows.
FIRST_NODE, DATA, TOKENIZER, SECRET = "NODE_0", "DATA_PREFIX", "TOKENIZER", "SECRET_OF_ALL_NODES"
_OF_DATA = (
    *("--data-path", DATA, "--tokenizer-type", "HuggingFaceTokenizer"),
    *("--tokenizer-model", TOKENIZER),
)
_HAS_DATA = {"--data-path", "--mock-data", "--text-dir", "--train-data-path", "--data-args-path"}
_COLUMNS = 108


@dataclass(frozen=True, kw_only=True, slots=True)
class StartCommand:
    """A command line that starts training on every node.

    Attributes:
        variables: to be set before it.
        launcher: words before the program.
        own: flags of moe_ft that are recommended.
    """

    variables: Mapping[str, str]
    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """All words, without the variables."""
        return (*self.launcher, self.program, *self.flags, *self.own)

    @property
    def text(self) -> str:
        """The command for a shell, in lines of bearable length."""
        head = (*(f"{name}={value}" for name, value in self.variables.items()), *self.launcher)
        lines = [*_lines((*head, self.program)), *_lines(self.flags), *self.own]
        return " \\\n".join(
            f"{'    ' if number else ''}{line}" for number, line in enumerate(lines)
        )

    @property
    def placeholders(self) -> list[str]:
        """Words that stand for what only the user knows."""
        text = " ".join((*self.variables.values(), *self.words))
        return [each for each in (SECRET, FIRST_NODE, PERSIST_DIR, DATA, TOKENIZER) if each in text]

    @property
    def is_kept(self) -> bool:
        """True if an agent forks the ranks."""
        return read_agent(self.launcher) is not None

    @property
    def is_watched(self) -> bool:
        """True if agents also replace nodes: there are several."""
        agent, torchrun = read_agent(self.launcher), read_torchrun(self.launcher)
        nodes = "1" if torchrun is None else _num_nodes(torchrun)
        return agent is not None and agent.get("nodes", nodes) != "1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a rank that the launcher sets and the rules of a start look at."""
        torchrun = read_torchrun(self.launcher)
        if torchrun is None:
            return {
                "SLURM_JOB_ID": "1"
            }  # or whatever names the job where srun or an agent starts it
        has_own = torchrun.rdzv_backend == "c10d" and self.variables.get(_OWN_STORE) == "1"
        shares = not (has_own or self.is_kept)  # an agent keeps a store of its own
        return {
            "TORCHELASTIC_USE_AGENT_STORE": str(shares),
            "TORCHELASTIC_MAX_RESTARTS": str(torchrun.max_restarts),
            "GROUP_WORLD_SIZE": _num_nodes(torchrun),
            "TORCHELASTIC_RUN_ID": torchrun.rdzv_id,
        }


def start_command(
    command: TrainingCommand, own: Sequence[str], *, world_size: int, ranks_per_node: int
) -> StartCommand:
    """Return what starts a job with further flags: protected by restarts where its launcher can do that.

    Args:
        command: as it was given, perhaps flags alone: torchrun then starts the ranks.
        own: flags of moe_ft.
    """
    launcher = command.launcher
    has_agent = read_agent(launcher) is not None
    if read_torchrun(launcher) is None and "srun" not in launcher and not has_agent:
        modules = _split_modules(launcher)[1]
        num_nodes = -(-world_size // ranks_per_node)
        launcher = ("torchrun", f"--nnodes={num_nodes}", f"--nproc-per-node={ranks_per_node}")
        launcher = (*launcher, *modules)
    variables = {}
    if torchrun := read_torchrun(launcher):
        is_alone = _num_nodes(torchrun) == "1"
        host = "localhost" if is_alone else FIRST_NODE
        before, modules = _split_modules(launcher)
        variables = {_OWN_STORE: "1"}
        if wants_repair((*command.flags, *own)) and not has_agent:
            before = tuple(_with_one_process(before))
            modules = (*_KEEP, f"--ranks-per-node={ranks_per_node}", "--", *modules)
            has_agent = True
        if has_agent and not is_alone:
            variables[TOKEN] = SECRET
        launcher = (*_with_restarts(before, host), *modules)
    has_data = command.program or {each.partition("=")[0] for each in command.flags} & _HAS_DATA
    return StartCommand(
        variables=variables,
        launcher=launcher,
        program=command.program or _PROGRAM,
        flags=command.flags if has_data else (*command.flags, *_OF_DATA),
        own=tuple(own),
    )


def _num_nodes(torchrun: argparse.Namespace) -> str:
    return str(torchrun.nnodes).rpartition(":")[2]  # the most


def _split_modules(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a launcher's own words, and those that run a module of moe_ft in each rank."""
    for place in range(len(words) - 1):
        if tuple(words[place : place + 2]) == ("-m", "moe_ft"):
            return tuple(words[:place]), tuple(words[place:])
    return tuple(words), ()


def _with_one_process(words: Sequence[str]) -> Iterator[str]:
    """Yield torchrun's words for one process a node, which runs the ranks of its node."""
    is_value = False
    for word in words:
        name, is_joined, _ = word.partition("=")
        if name.replace("_", "-") == "--nproc-per-node":
            is_value = not is_joined
        elif not is_value:
            yield word
        else:
            is_value = False
    yield "--nproc-per-node=1"


def _with_restarts(words: Sequence[str], host: str) -> Iterator[str]:
    """Yield torchrun's words with those that restart a job, which finds its memory by its name."""
    given, default = read_torchrun(words), read_torchrun(("torchrun",))
    assert given is not None and default is not None
    host = host if given.master_addr == default.master_addr else given.master_addr
    needed = {
        "--max-restarts": _NUM_RESTARTS,
        "--rdzv-backend": "c10d",
        "--rdzv-id": "my_job",
        "--rdzv-endpoint": f"{host}:{given.master_port or _PORT}",
    }
    yield from (word for word in words if word != "--standalone")  # which draws a name
    for name, value in needed.items():
        dest = name.removeprefix("--").replace("-", "_")
        if getattr(given, dest) == getattr(default, dest):  # the last one counts
            yield f"{name}={value}"


def _lines(words: Sequence[str]) -> Iterator[str]:
    """Yield words in lines, a flag with its values on one."""
    line = ""
    for word in map(shlex.quote, words):
        if line and len(line) + len(word) > _COLUMNS and word.startswith("-"):
            yield line
            line = word
        else:
            line = f"{line} {word}".lstrip()
    if line:
        yield line
