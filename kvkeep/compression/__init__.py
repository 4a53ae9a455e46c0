"""KV-cache compression: methods, and calibration of them."""
