"""Integer arithmetic that the standard library lacks."""


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of an integer that is not less than a number."""
    return ceil_div(number, multiple) * multiple
