"""llama.cpp's logits of GGUF files, for `gguf_fuzz`: run by a Python that has llama-cpp-python.

Reads one JSON object `{"path", "tokens", "out"}` per line of standard input, writes the logits of
all tokens to `out` with numpy, and answers with a line `{"error": null}` or the error. llama.cpp
aborts the process on some files: then there is no answer.
"""

import json
import os
import sys

import llama_cpp
import numpy as np

_F32 = 0  # GGML_TYPE_F32: keys and values are not rounded
_CONTEXT = 256


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the library's output out of the answers
    for line in sys.stdin:
        job = json.loads(line)
        try:
            np.save(job["out"], _logits(job["path"], job["tokens"]))
            answer = None
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": answer}), file=answers, flush=True)


def _logits(path: str, tokens: list[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Return logits `[len(tokens), vocabulary]`."""
    model = llama_cpp.Llama(
        model_path=path,
        n_ctx=_CONTEXT,
        n_batch=_CONTEXT,
        n_threads=1,
        logits_all=True,
        flash_attn=False,
        type_k=_F32,
        type_v=_F32,
        yarn_attn_factor=-1.0,  # -1: as in the file
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
        verbose=True,
    )
    try:
        model.eval(tokens)
        return np.array(model.scores[: len(tokens)])
    finally:
        model.close()


if __name__ == "__main__":
    main()
