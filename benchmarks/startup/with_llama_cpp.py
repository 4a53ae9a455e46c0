"""Load a file with llama-cpp-python and generate a token: `with_llama_cpp.py FILE THREADS`."""

import sys

import llama_cpp

llama = llama_cpp.Llama(
    model_path=sys.argv[1],
    n_ctx=512,
    n_threads=int(sys.argv[2]),
    n_threads_batch=int(sys.argv[2]),
    flash_attn=True,
    verbose=False,
)
llama.create_completion("hello", max_tokens=1, temperature=0)
