"""Rounding of figures in results."""


def rounded(value: float) -> float:
    """Round to four significant digits: ratios of two figures are then exact to a thousandth."""
    return float(f"{value:.4g}")
