"""The Dockerfile builds from what is in the repository; nothing here has Docker."""

import json
import re
import subprocess

from tests.unit.source import ROOT, text_files, text_of

# The end of a line with a backslash continues it.
INSTRUCTIONS = [
    (line.split(" ", 1)[0], line.split(" ", 1)[1])
    for line in re.sub(r"\\\n\s*", "", text_of("Dockerfile")).splitlines()
    if line and not line.startswith("#")
]


def of(name: str) -> list[str]:
    return [words for found, words in INSTRUCTIONS if found == name]


def test_files_that_the_image_copies_are_those_that_docker_gets() -> None:
    copied = {
        source
        for words in of("COPY")
        if not words.startswith("--from=")
        for source in words.split()[:-1]
    }
    *_, first = text_of(".dockerignore").splitlines()[:1]
    sent = {line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")}
    assert first == "*"
    assert copied == sent
    assert all((ROOT / each).exists() for each in copied)


def test_files_of_a_wheel_are_copied_into_the_image() -> None:
    needed = {path.split("/")[0] for path in text_files() if path.endswith(".py")}
    needed -= {"benchmarks", "tests"}
    assert needed <= {word for words in of("COPY") for word in words.split()}


def test_commands_of_the_image_are_of_a_shell_and_its_arguments_are_declared() -> None:
    assert {name for name, _ in INSTRUCTIONS} == {
        *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD")
    }
    for words in of("RUN"):
        subprocess.run(["sh", "-n", "-c", words], check=True)
    used = {name for _, words in INSTRUCTIONS for name in re.findall(r"\$\{?([A-Z_]+)", words)}
    assert used == {words.split("=")[0] for words in of("ARG")}


def test_image_starts_moe_ft_and_not_as_root() -> None:
    assert [json.loads(words) for words in of("ENTRYPOINT")] == [["python3", "-m", "moe_ft"]]
    (user,) = of("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)  # Kubernetes checks numbers
