"""llama.cpp's own API, as far as its clients use it."""
