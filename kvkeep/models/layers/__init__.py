"""The forward pass: layers, decoder and executors."""
