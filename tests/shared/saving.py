"""Saves a session to a store again and again, until it is killed; a fresh process each time.

All is imported once, and each saver is forked from that before anything of the store was used.
Lines of the input are seconds after which the next saver is killed, lines of the output what it
said by then: the number of each save that it began (+) and that was done (=).
"""

import os
import signal
import sys
import time

from kvkeep import Snapshot, load_model
from kvkeep.errors import StoreError
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SharedSessions

LEASE = 0.3  # seconds


def main(url: str, model_path: str, tokens: int) -> None:
    model = load_model(model_path)
    session = model.session(max_kv_size=tokens)
    session.feed([5] * (tokens - 8))
    snapshot = session.snapshot()
    for line in sys.stdin:
        said, says = os.pipe()
        child = os.fork()
        if not child:
            os.close(said)
            saves(url, snapshot, says)
        os.close(says)
        assert os.read(said, 1) == b"!"  # it holds the session
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(said, "rb") as told:
            print(told.read().decode().replace("\n", " "), flush=True)


def saves(url: str, snapshot: Snapshot, says: int) -> None:
    sessions = SharedSessions(open_object_store(url), writer=f"{os.getpid()}", lease=LEASE)
    while True:
        try:
            lease = sessions.acquire("one")
            break
        except StoreError:  # of the one that was killed
            time.sleep(0.01)
    os.write(says, b"!")
    number = lease.head.gen
    while True:
        number += 1
        snapshot.notes["number"] = number
        os.write(says, b"+%d\n" % number)
        from kvkeep.storage.sessions.shared import SessionPath

        snapshot.save(SessionPath(lease.objects, lease))
        os.write(says, b"=%d\n" % number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
