"""Calibration: per-model statistics that compression methods use."""
