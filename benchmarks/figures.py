"""Figures as results state them."""


def rounded(value: float) -> float:
    """To four digits that count, whatever its size: a ratio of two figures is that of the readings
    to a thousandth, on the fastest machine too.
    """
    return float(f"{value:.4g}")
