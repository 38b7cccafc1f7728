"""`moe_ft flags`: the --moe-ft-* flags with their defaults, without torch or Megatron.

Their help is made by config/flags.py from the settings, as that of a training script and docs/flags.md are.
"""

import argparse
import textwrap

from moe_ft.command_lines import FLAG_PREFIX
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.flags import Flag, groups_of, help_of, part_types
from moe_ft.errors import ConfigError
from moe_ft.spelling import hint
from moe_ft.strategies import registry

_COLUMNS = 80


def add_flags_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = add_command(
        commands,
        "flags",
        "list the flags that training scripts get, with defaults and needs",
        "First those that most jobs give; --all lists every one. With a NAME, or a part of it, it says all "
        "about these flags. docs/flags.md has them as a page.",
        "persist-dir",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="of a flag, such as interval, or a part of it"
    )
    parser.add_argument("--all", action="store_true", help="list every flag")
    parser.set_defaults(run=_run)


def groups() -> dict[str, list[Flag]]:
    """Return the flags of moe_ft and of its strategies by the title of their group."""
    parts = part_types(registry.option_types()).values()
    return groups_of(parts, {"strategy": registry.names()})


def _run(options: argparse.Namespace) -> int:
    found = groups()
    if options.name is not None:
        print("\n\n".join(map(_described, _named(options.name, sum(found.values(), [])))))
        return 0
    first = next(iter(found))
    print(help_of(found if options.all else {first: found[first]}), end="")
    if not options.all:
        others = sum(map(len, found.values())) - len(found[first])
        print(f"\nmoe_ft flags --all lists {others} more, moe_ft flags NAME says all about one.")
    return 0


def _named(name: str, flags: list[Flag]) -> list[Flag]:
    """Return the flag of a name, or those that have it in their names."""
    wanted = name.strip("-").replace("_", "-").removeprefix(FLAG_PREFIX.strip("-"))
    names = {each.name.removeprefix(FLAG_PREFIX): each for each in flags}
    found = [each for key, each in names.items() if key == wanted]
    found = found or [each for key, each in names.items() if wanted in key]
    if not found:
        known = [each.name for each in flags]
        raise ConfigError(
            f"NAME={name} is in no flag of moe_ft.{hint(name, known)} `moe_ft flags --all` lists them."
        )
    return found


def _described(flag: Flag) -> str:
    kinds = {type_: name for name, type_ in registry.option_types().items()}
    own = f"--moe-ft-strategy {kinds[flag.part]}" if flag.part in kinds else ""
    rows = {
        "default": flag.default,
        "needs": " and ".join(filter(None, (own, flag.needs))),
        "more": flag.page and f"docs/{flag.page}",
    }
    lines = [f"{flag.name} {flag.metavar}".rstrip(), textwrap.indent(_wrapped(flag.meaning), "  ")]
    lines += [f"  {name}: {text}" for name, text in rows.items() if text]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS - 2, break_on_hyphens=False)
