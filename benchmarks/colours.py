"""A palette that is distinguishable with all kinds of colour vision (Okabe and Ito, 2008)."""

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
GREY = "#666666"
