"""Lossy coding of cells: in a basis of the model, in whole multiples of a step."""
