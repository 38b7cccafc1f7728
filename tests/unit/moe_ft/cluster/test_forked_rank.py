"""A forked process becomes a rank; running scripts is in test_agent.py."""

import os
import random
from pathlib import Path

from moe_ft.cluster.forked_rank import become, run
from moe_ft.cluster.target import Target


def test_process_draws_other_random_numbers_than_the_one_it_was_forked_from() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    pid = os.fork()
    if pid == 0:
        become("rank_12", {"RANK": "12"})
        is_new = random.random() != expected and os.environ["RANK"] == "12"
        os._exit(not (is_new and os.getsid(0) == os.getpid()))
    assert os.waitpid(pid, 0)[1] == 0


def test_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(
        "import sys; open('facts', 'w').write(f'{__name__} {sys.argv[1:]} {sys.path[0]}')"
    )
    pid = os.fork()
    if pid == 0:
        os.chdir(tmp_path)
        run(Target(words=("-m", "some_module", "a"), preload=()))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "facts").read_text() == f"__main__ ['a'] {tmp_path}"
