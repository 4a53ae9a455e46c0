"""Measured fidelity: what a memory still knows."""
