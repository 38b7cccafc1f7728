"""`moe_ft examples`: show or copy the scripts that come with moe_ft, which users change.

They are the folders examples/ and tools/ and pretrain_gpt_moe.py. A wheel has them in its data, a checkout
where they are. setup.py asks this file what to ship, so it imports nothing that has to be installed.
"""

import argparse
import shutil
from importlib import metadata
from pathlib import Path, PurePath

from moe_ft.commands.parsers import Commands, add_command
from moe_ft.errors import ConfigError

SHARE = PurePath("share/moe_ft")  # of an installation
_CHECKOUT = Path(__file__).parents[2]


def add_examples_command(commands: Commands) -> None:
    """Add the command and its flag."""
    parser = add_command(
        commands,
        "examples",
        "show the example scripts and tools of moe_ft, or copy them",
        "Scripts for one node, SLURM and Kubernetes, which you change.",
        "--copy my_examples",
    )
    parser.add_argument("--copy", metavar="DIR", type=Path, help="copy them into a new folder")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = shipped_files()
    if options.copy is None:
        print(*sorted(map(str, found)), sep="\n")
        return 0
    copy_to(options.copy, found)
    print(f"{options.copy}: {len(found)} files copied. Begin with {options.copy}/examples")
    return 0


def shipped_files() -> dict[PurePath, Path]:
    """Return where each file is, by its path in a copy.

    Raises:
        ConfigError: if the installation lacks them.
    """
    if (_CHECKOUT / "setup.py").is_file():
        paths = [_CHECKOUT / "pretrain_gpt_moe.py"]
        paths += [
            path for name in ("examples", "tools") for path in (_CHECKOUT / name).rglob("*.*")
        ]
        files = (path for path in paths if path.is_file() and path.suffix != ".pyc")
        return {path.relative_to(_CHECKOUT): path for path in files}
    parts = SHARE.parts
    found = {}
    for each in metadata.files("moe-ft") or ():
        at = [each.parts[start : start + len(parts)] for start in range(len(each.parts))]
        if parts in at:
            path = PurePath(*each.parts[at.index(parts) + len(parts) :])
            found[path] = Path(str(each.locate()))
    if not found:
        raise ConfigError(
            "this installation of moe_ft has no examples: it was not made from a wheel. Take them from a "
            "checkout of moe_ft, or install its wheel (pip install .)."
        )
    return found


def copy_to(folder: Path, files: dict[PurePath, Path]) -> None:
    """Copy files into a folder, which is made.

    Raises:
        ConfigError: if the folder holds anything, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(
                f"--copy={folder} is not empty: nothing was copied. Give a new folder."
            )
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    except OSError as error:
        raise ConfigError(
            f"--copy={folder} cannot be written ({error.strerror}): it must be a new folder. Give another."
        ) from error
