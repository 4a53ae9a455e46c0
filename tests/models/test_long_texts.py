"""Encoding of long texts, which takes seconds: other threads go on meanwhile."""

import threading
import time

from kvkeep.model import Model
from kvkeep.models.text.control_tokens import encoded_ids


def test_a_long_text_has_the_ids_of_the_tokenizer(smollm2: Model) -> None:
    text = "All work and no play <|im_end|> makes\tJack 1234 a dull boy. \n\n" * 200
    tokenizer = smollm2.text.tokenizer
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert encoded_ids(tokenizer, text) == expected
    assert smollm2.text.encode(text, special=True) == expected


def test_other_threads_go_on_while_a_long_text_is_encoded(smollm2: Model) -> None:
    text, ticks, done = "all work and no play " * 20_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        encoded_ids(smollm2.text.tokenizer, text)
        during = ticks - before
    finally:
        done.set()
        thread.join()
    assert during > 3
