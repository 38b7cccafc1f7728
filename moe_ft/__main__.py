"""Entry of ``python -m moe_ft``, and of the command ``moe_ft``."""

import sys


def main() -> int:
    """Run the command line of this process; return the exit code."""
    if sys.version_info < (3, 12):  # noqa: UP036 - a checkout may be run by any Python
        version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"moe_ft: error: {sys.executable} is Python {version}, and moe_ft needs 3.12 or newer. Start it "
            "with the Python in which it is installed.",
            file=sys.stderr,
        )
        return 2
    if sys.argv[1:] == ["--version"]:
        return _show_versions()
    try:
        # First, since every start waits for it: the other commands import half a second.
        from moe_ft.commands.launch import keep, launch
        from moe_ft.commands.run import is_given

        if is_given("launch", sys.argv[1:]):
            launch(sys.argv[2:])
        if is_given("keep", sys.argv[1:]):
            keep(sys.argv[2:])
        from moe_ft import cli

        return cli.main()
    except ModuleNotFoundError as error:
        _refuse_if_missing(error.name)
        raise


def _show_versions() -> int:
    """Print what is installed; return 2 if something that moe_ft needs is not."""
    from moe_ft.installation import describe, missing_packages, remedy_for

    print(describe())
    missing = missing_packages()
    if missing:
        print(f"error: {remedy_for(missing)}", file=sys.stderr)
    return 2 if missing else 0


def _refuse_if_missing(module: str | None) -> None:
    """End with one line if a module is of a package that moe_ft needs, which is not installed."""
    from moe_ft.installation import MODULES, missing_packages, remedy_for
    from moe_ft.loop.refusing import refuse

    ours = {each.partition(".")[0] for each in MODULES.values()}
    missing = missing_packages() if module and module.partition(".")[0] in ours else []
    if missing:
        refuse(remedy_for(missing), "moe_ft")


if __name__ == "__main__":
    sys.exit(main())
