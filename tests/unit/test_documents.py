"""Documents say what is so: commands, flags and packages exist, tables are whole, figures have a source."""

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import PurePosixPath

import pytest
from megatron.training.arguments import add_megatron_arguments
from torch.distributed.run import get_args_parser

from benchmarks.output import STAMP, git
from moe_ft import cli
from moe_ft.command_lines import FLAG_PREFIX
from moe_ft.config.flag_table import FLAGS, NEWER, names_in
from moe_ft.strategies.registry import kinds
from tests.unit.source import ROOT, check_rule, product_files, text_files, text_of, tree_of

DOCUMENTS = [path for path in text_files() if path.endswith(".md")]
PAGES = [
    path
    for path in DOCUMENTS
    if path.startswith("docs/benchmarks/") and not path.endswith("/README.md")
]
CODE = re.compile(r"`([^`\n]+)`|^(    .*)$", re.MULTILINE)
COMMAND = re.compile(r"(?:^ *|-m |\$ |/)moe_ft ([a-z]+)(?![\w:.])(.*)")
FLAG = re.compile(r"(?<![\w-])--[a-z](?:[\w-]*\w)?(?![\w*-])")
NUMBER = r"\d+(?:[.,]\d+)*"
FIGURE = re.compile(
    rf"{NUMBER}(?:(?: to |-){NUMBER})* ?(?:s|ms|minutes|%|x|[KMGT]i?B(?:/s)?|bytes)(?![\w/])"
)
_OPTIONS = r"(?:-\S+ (?:(?:constraints\.txt|URL|wheelhouse|auto|~/\w+) )?)*"
INSTALL = re.compile(
    rf"pip install (?!(?:--[\w-]+ )*--no-index)(?:{_OPTIONS})['\"]?(\w[\w-]*|\.)(?:\[(\w+)\])?(?![\w.])"
)
IN_A_BLOCK = re.compile(r" {2,}\S|- |\d+\. ")  # of a list, or of code
COMMIT = re.compile(r"`(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)([0-9a-f]{7,40})`")
_OF_DEATHS = ("moe_ft/cluster", "moe_ft/loop", "moe_ft/recovery", "megatron/fault_tolerance/repair")
# Code that the pages of the README's rows measure.
MEASURED = {
    "recovery_time": _OF_DEATHS,
    "simulator_vs_measured": ("moe_ft/simulate", *_OF_DEATHS),
    "spare_nodes": _OF_DEATHS,
    "stall": ("moe_ft/kernels", "moe_ft/engine", "moe_ft/state", "moe_ft/strategies"),
}
_OLD = 30  # commits of that code
LINK = re.compile(r"\]\(([\w/.]+\.md)[^)]*\)")
_ROOMY = {"moe_ft", "megatron/fault_tolerance"}  # what is in them has lines of its own
_MOST_WORDS = 1200  # five minutes of reading, but for code and tables
_LISTS = {"docs/events.md", "docs/flags.md"}  # nobody reads these from top to bottom
# Programs of others that documents show.
_OF_OTHERS = {
    *("--native", "--from-literal", "--recipe", "--mode"),  # of py-spy, kubectl, Megatron-Bridge
    *(
        "--build-arg",
        "--env",
        "--gpus",
        "--ipc",
        "--rm",
        "--shm-size",
        "--tag",
        "--volume",
    ),  # docker
    *("--find-links", "--no-index", "--torch-backend"),  # pip, uv
}


def code_of(path: str) -> Iterator[str]:
    """Yield what a document shows as code: inline, and lines of blocks, each with those that continue it."""
    for inline, line in CODE.findall(text_of(path).replace("\\\n", " ")):
        yield inline or line


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of `python -m moe_ft`, by command."""
    (found,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(found)


@cache
def known_flags() -> frozenset[str]:
    """Return the flags of Megatrons and torchrun, and those that code and scripts of the repository name."""
    megatron = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(megatron)
    found = {*megatron._option_string_actions, *get_args_parser()._option_string_actions}
    found.update(
        "--" + name.replace("_", "-") for name in names_in(" ".join(FLAGS[NEWER].values()))
    )
    for parser in commands().values():
        found.update(parser._option_string_actions)
    for path in text_files():
        if not path.endswith(".md"):
            found.update(FLAG.findall(text_of(path)))
    return frozenset(found)


def wrong_commands(path: str) -> Iterator[str]:
    for code in code_of(path):
        for name, rest in COMMAND.findall(code):
            if name not in commands():
                yield f"{path}: moe_ft {name}"
            elif name != "run":  # whose flags are the script's
                flags = FLAG.findall(re.split(r" -- |#|\S+\.py\b", rest)[0])
                known = {*commands()[name]._option_string_actions}
                if name == "launch":  # in front of a script of Megatron-Bridge
                    known |= {each for each in known_flags() if each.startswith(FLAG_PREFIX)}
                yield from (f"{path}: moe_ft {name} {flag}" for flag in flags if flag not in known)


def test_commands_that_documents_show_exist_with_the_options_shown() -> None:
    check_rule((each for path in DOCUMENTS for each in wrong_commands(path)), "no such command")


def test_flags_that_documents_show_exist() -> None:
    wrong = (
        f"{path}: {flag}"
        for path in DOCUMENTS
        for code in code_of(path)
        for flag in FLAG.findall(code)
        if flag not in known_flags() | _OF_OTHERS
    )
    check_rule(wrong, "no program here has these flags")


def test_packages_that_people_are_told_to_install_are_extras_and_dependencies_of_the_project() -> (
    None
):
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    needed = chain(project["dependencies"], *extras.values())
    packages = {re.split(r"[<>=\[]", each)[0] for each in needed}
    wrong = (
        f"{path}: {name}[{extra}]"
        for path in (*DOCUMENTS, *product_files())
        for name, extra in INSTALL.findall(" ".join(text_of(path).split()))
        if not (extra in {"", *extras} if name == "." else name in packages)
    )
    check_rule(wrong, "this project is not on PyPI: name the package, or an extra as '.[EXTRA]'")


def badly_set_lines(path: str) -> Iterator[str]:
    """Yield the lines that a browser does not show as they are meant."""
    # A site from a folder, in a cluster without a network, draws and loads nothing that is elsewhere.
    yield from (
        f"{path}: {found}"
        for found in re.findall(
            r"```mermaid|<script.*|(?:!\[.*\]\(|src=[\"'])https?:.*", text_of(path)
        )
    )
    lines = re.sub(r"(?s)```.*?```", "", text_of(path)).splitlines()
    for before, line in pairwise(["", *lines]):
        is_text = bool(line) and not line[0].isspace()
        runs_on = is_text and IN_A_BLOCK.match(before) and not IN_A_BLOCK.match(line)
        if runs_on or (is_text and line.endswith(" \\")) or re.search(r"`[^`]*\\\|[^`]*`", line):
            yield f"{path}: {line}"


def test_pages_are_shown_as_they_are_meant() -> None:
    wrong = (each for path in DOCUMENTS for each in badly_set_lines(path))
    check_rule(
        wrong,
        r"indent code and lists, end them with an empty line, show no \| in code, and nothing from elsewhere",
    )


def test_lists_of_strategies_have_all_of_them() -> None:
    names = {kind.name for kind in kinds()}
    wrong = (
        f"{path}: {block}"
        for path in {*DOCUMENTS} - {*PAGES}
        for block in text_of(path).split("\n\n")
        if len(found := {*re.findall(r"^(?:\||-) \**`(\w+)`", block, re.MULTILINE)} & names) > 1
        if found != names
    )
    check_rule(wrong, "add what is missing, or say why it is")


def test_list_of_commands_is_that_of_the_command_line() -> None:
    (listed,) = re.findall(r"moe_ft \{([a-z,]+)\}", text_of("docs/architecture.md"))
    assert sorted(listed.split(",")) == sorted(commands())


def test_every_folder_of_the_product_is_in_the_table_of_the_architecture() -> None:
    rows = [line for line in text_of("docs/architecture.md").splitlines() if line[:1] == "|"]
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row.split(" | ")[0])}
    folders = {PurePosixPath(path).parent for path in product_files() if path.count("/") > 1}
    wrong = (
        folder
        for folder in folders
        if str(folder) not in _ROOMY
        if not named & {*map(str, (folder, *folder.parents))} - _ROOMY
    )
    check_rule(map(str, wrong), "add a line for each to the table in docs/architecture.md")
    check_rule((each for each in named if not (ROOT / each).is_dir()), "no such folders")


def figures_without_a_source(path: str, text: str) -> Iterator[str]:
    """Yield the figures of sentences that link to a page of docs/ where they do not occur."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)", text):
        for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z*])", " ".join(paragraph.split())):
            pages = [page for page in LINK.findall(sentence) if page.startswith("docs/")]
            known = "\n".join(text_of(page) for page in pages)
            numbers = {
                number for each in FIGURE.findall(sentence) for number in re.findall(NUMBER, each)
            }
            for number in numbers if pages else ():
                if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", known):
                    yield f"{path}: {number} is not on {', '.join(pages)}"


def test_figures_of_the_readme_are_on_the_page_that_they_link_to() -> None:
    check_rule(figures_without_a_source("README.md", text_of("README.md")), "figures need a source")


def test_every_page_of_benchmarks_says_at_its_head_of_which_commit_its_figures_are() -> None:
    wrong = (
        path
        for path in PAGES
        if not (found := STAMP.search(text_of(path)))
        or " with changes" in found[0]
        or re.search(r"^(?:\||#{2,} )", text_of(path)[: found.start()], re.MULTILINE)
    )
    check_rule(wrong, "benchmarks/output.py stamps a page; it goes above the first table")


@pytest.fixture
def history() -> frozenset[str]:
    """Return the commits that lead to this one."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("this copy has no history")
    return frozenset(git("rev-list", "HEAD").split())


def test_commits_that_pages_name_are_in_the_history(history: frozenset[str]) -> None:
    wrong = (
        f"{path}: {commit}"
        for path in (*PAGES, "docs/results/reproduction.md")
        for commit in COMMIT.findall(text_of(path))
        if not any(each.startswith(commit) for each in history)
    )
    check_rule(wrong, "no such commits: measure again, or name the commit that has the same code")


def test_rows_of_the_readme_that_are_older_than_their_code_are_marked(
    history: frozenset[str],
) -> None:
    rows = re.findall(r"^(\|.*docs/benchmarks/(\w+)\.md.*)$", text_of("README.md"), re.MULTILINE)
    assert len(rows) > 4
    wrong = (
        f"{page}: {age} commits since {commit}"
        for row, page in rows
        for commit, _ in STAMP.findall(text_of(f"docs/benchmarks/{page}.md"))[:1]
        for age in [int(git("rev-list", "--count", f"{commit}..HEAD", "--", *MEASURED[page]))]
        if (age > _OLD) != ("†" in row)
    )
    check_rule(wrong, "mark the rows with a †, or run the command at the head of the page again")


def num_words(text: str) -> int:
    """Return the words of a document that are read one after the other: neither code nor tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = (line for line in text.splitlines() if not re.match(r" {4}|\s*\|", line))
    return len(" ".join(lines).split())


def test_pages_take_five_minutes_to_read() -> None:
    wrong = (
        f"{path}: {words} words"
        for path in DOCUMENTS
        if path.startswith("docs/") and path not in _LISTS and path not in PAGES
        if (words := num_words(text_of(path))) > _MOST_WORDS
    )
    check_rule(
        wrong, f"more than {_MOST_WORDS} words; divide the page into a guide and a reference"
    )


def test_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 120, "move the rest into docs/"


def unknown_messages(text: str) -> Iterator[str]:
    """Yield the messages of tables in a text whose words are not in the product."""
    said = "\n".join(
        node.value
        for path in product_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for message in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE):
        for words in re.split(r"[^a-zA-Z' .-]|\.\.\.", message):
            if len(words.strip()) > 8 and words.strip(" .") not in said:
                yield f"{message}: {words.strip()}"


def test_messages_that_the_documentation_explains_are_printed() -> None:
    check_rule(unknown_messages(text_of("docs/messages.md")), "nothing in the product says this")
