"""Removes a session while it is being locked, and counts who gets the lock.

`python lock_removed_session.py FOLDER`: an audit hook removes the lock file between the moments
when it is opened and when it is locked.
"""

import sys
from contextlib import suppress

from kvkeep.errors import Locked
from kvkeep.storage.sessions.folder import SessionFolder

folder, pending = SessionFolder(sys.argv[1]), ["a"]


def remove_session(event: str, arguments: tuple[object, ...]) -> None:
    if event == "fcntl.flock" and pending:
        folder.discard(pending.pop())


sys.addaudithook(remove_session)
count = 0
with suppress(Locked), folder.lock("a"):
    count += 1
    with suppress(Locked), folder.lock("a"):
        count += 1
print("locked twice" if count == 2 else "locked once")
