"""Load a folder with mlx-lm and generate a token: `with_mlx_lm.py FOLDER`."""

import sys

import mlx_lm

model, tokenizer = mlx_lm.load(sys.argv[1])
mlx_lm.generate(model, tokenizer, "hello", max_tokens=1)
