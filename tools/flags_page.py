"""Write the tables of flags in docs/flags.md from the settings: python -m tools.flags_page.

The rest of that page is written by hand. A test compares the two.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from moe_ft.commands.flags import groups
from moe_ft.config.flags import Flag

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
BEGIN = "<!-- These tables are written by `python -m tools.flags_page`. -->\n"
END = "<!-- Here they end. -->\n"
_NEED = re.compile(r"--[\w-]+(?: (?!(?:and|or|other)\b)[\w-]+)?")
_CODE = re.compile(r"(?P<code>`[^`]*`)|(?P<flag>--[a-z][\w-]*)")


def tables() -> str:
    """Return all flags of moe_ft, those that most jobs give first."""
    return "\n".join(line for title, flags in groups().items() for line in _table(title, flags))


def _table(title: str, flags: list[Flag]) -> Iterator[str]:
    page = flags[0].part.PAGE
    yield from (f"### {title[0].upper()}{title[1:]}", "")
    if page and title != "basic":
        yield from (f"See [{page.removesuffix('.md').replace('_', ' ')}]({page}).", "")
    yield from ("| flag | default | meaning |", "|---|---|---|")
    for each in flags:
        own = each.page if title == "basic" or each.page != page else ""
        needs = f"; needs {_NEED.sub(r'`\g<0>`', each.needs)}" if each.needs else ""
        more = f" ([more]({own.removeprefix('flags.md')}))" if own else ""
        name = f"`{each.name} {each.metavar}".rstrip() + "`"
        yield f"| {name} | {_marked(each.default)} | {_marked(each.meaning + needs)}{more} |"
    yield ""


def _marked(text: str) -> str:
    """Return a text with its flags as code."""
    return _CODE.sub(lambda found: found["code"] or f"`{found['flag']}`", text)


def page_with(text: str, inserted: str) -> str:
    """Return a page with other tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{inserted}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), tables()))
