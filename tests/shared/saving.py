"""A script that saves a session to a store in child processes and kills each of them.

It imports everything once, and forks each child before the store is used. Each line of the input is
the number of seconds after which the next child is killed. Each line of the output is what that
child reported: the number of each save that it began (`+`) and that it finished (`=`).
"""

import os
import signal
import sys
import time

from kvkeep import Snapshot, load_model
from kvkeep.errors import StoreError
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SessionPath, SharedSessions

LEASE_SECONDS = 0.3


def main(url: str, model_path: str, tokens: int) -> None:
    model = load_model(model_path)
    session = model.session(max_kv_size=tokens)
    session.feed([5] * (tokens - 8))
    snapshot = session.snapshot()
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            save_until_killed(url, snapshot, writer)
        os.close(writer)
        assert os.read(reader, 1) == b"!"  # it has leased the session
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as output:
            print(output.read().decode().replace("\n", " "), flush=True)


def save_until_killed(url: str, snapshot: Snapshot, writer: int) -> None:
    """Save without end, and report to the pipe `writer`: `!` with the lease, then each save."""
    sessions = SharedSessions(
        open_object_store(url), writer=f"{os.getpid()}", lease_seconds=LEASE_SECONDS
    )
    while True:
        try:
            lease = sessions.acquire("one")
            break
        except StoreError:  # the lease of the killed child has not expired yet
            time.sleep(0.01)
    os.write(writer, b"!")
    number = lease.head.gen
    while True:
        number += 1
        snapshot.notes["number"] = number
        os.write(writer, b"+%d\n" % number)
        snapshot.save(SessionPath(lease.objects, lease))
        os.write(writer, b"=%d\n" % number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
