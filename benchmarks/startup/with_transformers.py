"""Load a folder with transformers and generate a token: `with_transformers.py FOLDER DEVICE`."""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, device = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
model.to(device)
prompt = tokenizer("hello", return_tensors="pt").to(device)
model.generate(**prompt, max_new_tokens=1, do_sample=False)
