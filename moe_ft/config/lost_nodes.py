"""Answer of a job to a lost node when no spare is left: one rule for agents, the coordinator and ranks.

Also the words of earlier versions for it. A command line may still have them, and a line at the start names
those of today.
"""

from collections.abc import Callable

from moe_ft.config.fields import flag_of

FLAG, OLD_FLAG, ELASTIC = (flag_of(name) for name in ("without_spare", "spare", "elastic"))
ANSWERS = ("auto", "end", "wait", "crowd", "share", "shrink")
CROWDED = ("crowd", "share")  # a node that trains also runs the ranks of the lost one
OLD_WORDS = ("off", "reroute")  # for this flag; "reroute" is "share" now
OLD_ANSWERS = ("restart", "wait")  # of the flag before it


def word_of_today(given: str, old: str, *, is_elastic: bool) -> str:
    """Return a value of --moe-ft-without-spare.

    Args:
        given: the value on the command line; empty for none.
        old: that of --moe-ft-spare, which counted where nothing else was asked for.
    """
    if given in ("", "auto", "off") and (old or given == "off"):
        return "wait" if old == "wait" else "shrink" if is_elastic else "end"
    return "share" if given == "reroute" else given or "auto"


def answer(value: str, *, is_elastic: bool) -> str:
    """Return what a value of --moe-ft-without-spare asks for: `auto` has no meaning of its own."""
    if value != "auto":
        return value
    return "shrink" if is_elastic else "crowd"


def answer_of(value_of: Callable[[str], str], is_elastic: bool) -> str:
    """Return what a command line asks for; `value_of` returns the value of a flag, empty for none."""
    value = word_of_today(value_of(FLAG), value_of(OLD_FLAG), is_elastic=is_elastic)
    return answer(value, is_elastic=is_elastic)


def line_on_old_words(given: str, old: str, *, is_elastic: bool) -> str:
    """Return a line that names the words of today; empty where none of earlier versions were given."""
    words = [f"{OLD_FLAG}={old}"] * bool(old) + [f"{FLAG}={given}"] * (given in OLD_WORDS)
    if not words:
        return ""
    value = word_of_today(given, old, is_elastic=is_elastic)
    is_are = "is" if len(words) == 1 else "are"
    return f"{' and '.join(words)} {is_are} {FLAG} {value} now: write that"
