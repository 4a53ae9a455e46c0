"""KV-cache compression: methods, plans, reconstruction scores and calibration."""
