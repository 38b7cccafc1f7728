"""The commands of the pages that a newcomer reads first run as written, in a fresh copy of the repository.

A block of these pages is run here, or is in `_NOT_RUN` with the reason. Blocks with fixed ports and names
have a network, processes and memory of their own.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.processes import kill_all
from tests.shares import share_of
from tests.unit.moe_ft.commands.published_models import read_published
from tests.unit.moe_ft.commands.test_plan_inputs import write_log
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
README, SITE = "README.md", "docs/index.md"
_PAGES = (README, SITE, "docs/quickstart.md", "docs/own_script.md", "docs/plan.md")
_DEADLINE_S = 400.0
_WINDOW = 8  # iterations, at most (--moe-ft-max-window), until state is complete
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --ffn-hidden-size 64 --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --use-distributed-optimizer --bf16 "
    "--micro-batch-size 1 --global-batch-size 16 --lr 3e-3 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --vocab-size 256 --train-iters"
)
_PLANNED = f"pretrain_gpt_moe.py {_MODEL} 9 --global-batch-size 128"
# A value for each placeholder.
_WORDS = {
    "NUM_GPUS": "2",
    "NUM_NODES": "1",
    "HOST:PORT": "localhost:29500",
    "SECRET": "of_sixteen_letters_or_more",
    "N": "0",
    "NAME": "documented",
    "pretrain_gpt.py": "examples/pretrain_own.py",
    "YOUR_FLAGS": f"--base 16 {_MODEL} 500 $MEMORY",
    "DIR_OR_FILES": "docs",
    "DIR": "docs",
    "MEGATRON_FLAGS": f"{_MODEL} 2",
    "/scratch/run/events": "measured",
    "PATH/config.json": "measured/config.json",
    "torchrun ...": f"torchrun --nproc-per-node 8 {_PLANNED}",
    "pretrain_gpt_moe.py ...": _PLANNED,
}
_PUBLISHED = read_published()["qwen3-vl-30b-a3b-instruct"].config
_PUBLISHED["text_config"]["num_hidden_layers"] = 4  # a plan builds each layer
_WORD = re.compile("|".join(rf"(?<![\w/]){re.escape(word)}(?![\w/])" for word in _WORDS))
_UNKNOWN = re.compile(r"(?<!\S)/\S+|(?<![\w$-])[A-Z]{2}[A-Z_:]*(?![\w=])|\.\.\.")
_BLOCK = re.compile(r"(?:^    .*\S\n)+", re.MULTILINE)
_LAUNCH = "python -m moe_ft launch --ranks-per-node NUM_GPUS"
_NODES = "export MOE_FT_KEEP_TOKEN="
_OWN = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_BY_HAND = "MAX_RESTARTS=3 examples/quickstart.sh"
_NOT_RUN = {
    ("docs/quickstart.md", "make demo"): "test_demo.py runs it",
    (
        "docs/own_script.md",
        "from megatron.fault_tolerance import",
    ): "test_launch.py runs such a script",
    ("docs/own_script.md", "args = parse_and_validate_args("): "the same",
    ("docs/plan.md", "what would change"): "the output of a command",
    ("docs/plan.md", "checkpoint "): "the output of a command",
    ("docs/plan.md", 'like = "dgx-h100"'): "a file",
    ("docs/plan.md", "ETTR = "): "a formula",
}
# The end of what a block prints; it is ended then if it trains for long.
_RUN = {
    (
        "docs/quickstart.md",
        "examples/own_script.sh",
    ): "rank 1 .*replaced(.|\n)*\nloss",
    (
        "docs/quickstart.md",
        "examples/own_script.sh --moe-ft-repair",
    ): "begin again(.|\n)* continues after iteration (19|20), (.|\n)*\nloss",
    ("docs/quickstart.md", "source .venv/bin/activate"): "iteration +2/ +2 ",
    ("docs/quickstart.md", "torchrun --nproc-per-node 4"): "iteration +2/ +2 ",
    ("docs/quickstart.md", "examples/quickstart.sh --moe-ft-inject"): "heard nothing from rank 3",
    ("docs/own_script.md", _LAUNCH): "iteration +3/",
    ("docs/own_script.md", _NODES): "iteration +3/",
    ("docs/own_script.md", _OWN): "iteration +3/",
    ("docs/plan.md", "python -m moe_ft plan --model deep"): "(recommended(.|\n)*){3}",
    ("docs/plan.md", "python -m moe_ft plan --model PATH"): "recommended(.|\n)*left out: vision",
    ("docs/plan.md", "python -m moe_ft plan --iteration-s"): "ETTR",
    ("docs/plan.md", "python -m moe_ft plan -- torchrun"): r"snapshot +4 +7,898.9",
}
_QUICK = [key for key in _RUN if "plan --iter" in key[1] or "plan -- " in key[1]]


def blocks(page: str) -> list[str]:
    """Return the blocks of a page that are no text."""
    found = _BLOCK.findall((ROOT / page).read_text())
    return ["".join(line[4:] for line in each.splitlines(keepends=True)) for each in found]


def block(page: str, first: str) -> str:
    """Return the last block of a page that begins with a text, as a reader types it."""
    found = [each for each in blocks(page) if each.startswith(first)]
    text = re.sub(r"\s#.*", "", min(found, key=len))
    typed = _WORD.sub(lambda match: _WORDS[match[0]], text)
    assert not (unknown := _UNKNOWN.findall(typed)), (
        f"{page}: what does a reader write for {unknown}?"
    )
    return typed


class Terminal:
    """A command line that has been typed, and what it prints."""

    def __init__(self, text: str, folder: Path, enter: list[str], env: dict[str, str]) -> None:
        """Start it."""
        descriptor, name = tempfile.mkstemp(prefix="output_", dir=folder.parent)
        self._output = Path(name)
        with os.fdopen(descriptor, "w") as output:
            words = [*enter, "bash", "-ec", f"cd {folder}\n{text}"]
            self.process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.PIPE,  # ends with this process, and so does `cat`
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until something is printed; fail the test if the command ends before."""

        def find() -> re.Match[str] | None:
            has_ended = self.process.poll() is not None
            found = re.search(pattern, self.output)
            assert found or not has_ended, f"never printed: {pattern}\n{self.output[-6000:]}"
            return found

        return wait_for(find, pattern, _DEADLINE_S, poll_s=0.05)

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank, which an agent has forked."""
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it may have ended
                if each.name() == f"rank_{number}":
                    return each
        raise AssertionError(f"there is no rank {number}")


class Machine:
    """A fresh copy of the repository, and terminals on it; nothing of them runs after its context."""

    def __init__(self, folder: Path, *, is_apart: bool = False, memory: str = "") -> None:
        """Copy the repository.

        Args:
            is_apart: with a network, processes and host memory that no other test sees.
            memory: flags that are part of the reader's own.
        """
        self._folder = folder / "copy"
        self._is_apart = is_apart
        self._enter: list[str] = []
        self._terminals: list[Terminal] = []
        listed = ["git", "ls-files", "-coz", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            if (ROOT / name).is_file():
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self._folder / name)
        (self._folder / ".venv").symlink_to(ROOT / ".venv")
        (self._folder / "measured").mkdir()
        write_log(self._folder / "measured", 0, 1.0)
        (self._folder / "measured/config.json").write_text(json.dumps(_PUBLISHED))
        kept = ("HOME", "LANG", "OMP_NUM_THREADS", "TMPDIR")
        self._env = {name: os.environ[name] for name in kept if name in os.environ}
        self._env |= {"PATH": f"{self._folder}/.venv/bin:{os.environ['PATH']}", "MEMORY": memory}
        self._env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        if self._is_apart:
            apart = [
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
            ]
            text = "mount -t tmpfs tmpfs /dev/shm; ip link set lo up; echo ready; exec cat"
            anchor = Terminal(text, self._folder, apart, self._env)
            self._terminals.append(anchor)
            wait_for(
                lambda: "ready" in anchor.output or anchor.process.poll() is not None, "a network"
            )
            if anchor.process.poll() is not None:
                pytest.skip(f"needs root and namespaces: {anchor.output}")
            (first,) = psutil.Process(anchor.process.pid).children()
            self._enter = ["nsenter", "--target", str(first.pid), "--mount", "--net", "--pid"]
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._terminals[::-1]:
            if each.process.poll() is None:
                own = psutil.Process(each.process.pid)
                kill_all([own, *own.children(recursive=True)])
            each.process.wait()

    def type(self, text: str) -> Terminal:
        """Type commands into a new terminal."""
        self._terminals.append(Terminal(text, self._folder, self._enter, self._env))
        return self._terminals[-1]


def test_each_block_of_the_first_pages_is_run_or_has_a_reason() -> None:
    known = {*_RUN, *_NOT_RUN, (README, _LAUNCH), (SITE, _LAUNCH), (README, _BY_HAND)}
    found = [(page, each) for page in _PAGES for each in blocks(page)]
    unknown = [
        (p, b) for p, b in found if not any(p == page and b.startswith(w) for page, w in known)
    ]
    gone = [
        (page, w) for page, w in known if not any(p == page and b.startswith(w) for p, b in found)
    ]
    assert (unknown, gone) == ([], [])
    assert block(README, _LAUNCH) == block(SITE, _LAUNCH)


def test_first_command_replaces_a_dead_rank_and_continues_when_it_is_typed_again(
    tmp_path: Path, memory_dir: Path
) -> None:
    command = block(README, _LAUNCH)
    continues = r"training continues after iteration (\d+), .* memory"
    with Machine(tmp_path, memory=f"--moe-ft-memory-dir {memory_dir}") as machine:
        first = machine.type(command)
        first.wait_for(f"iteration +{2 * _WINDOW}/")
        first.rank(1).kill()
        first.wait_for("rank 1 replaced in .* no other rank was restarted")
        restored = int(first.wait_for(continues)[1])
        assert restored >= _WINDOW
        first.wait_for(f"iteration +{restored + 2 * _WINDOW}/")
        os.killpg(first.process.pid, signal.SIGINT)  # as Ctrl-C does
        assert first.process.wait(_DEADLINE_S) != 0
        again = machine.type(command)
        assert int(again.wait_for(continues)[1]) > restored
        again.wait_for("iteration +")


@pytest.mark.parametrize("key", share_of(_RUN, *_QUICK), ids=lambda key: "-".join(key))
def test_commands_run_as_written(key: tuple[str, str], tmp_path: Path) -> None:
    with Machine(tmp_path, is_apart=" plan " not in key[1]) as machine:
        terminal = machine.type(block(*key))
        terminal.wait_for(_RUN[key])
        if key[1] not in (_LAUNCH, _NODES, _OWN):
            has_failed = terminal.process.wait(_DEADLINE_S) != 0
            assert has_failed == ("kill:3" in block(*key)), terminal.output[-6000:]


@pytest.mark.rest
def test_job_started_by_hand_is_repaired_and_watched(tmp_path: Path) -> None:
    train, kill, watch = block(README, _BY_HAND).splitlines()
    with Machine(tmp_path, is_apart=True) as machine:
        first = machine.type(train)
        first.wait_for("iteration 10 of")
        assert machine.type(kill).process.wait(_DEADLINE_S) == 0
        first.wait_for(r"rank 3 has died \(Killed\), and is replaced")
        machine.type(watch).wait_for("rank")
        first.wait_for("rank 3 replaced in ")
