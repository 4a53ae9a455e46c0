"""A kill while a session is saved to S3 leaves the old session or the new one."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from object_server import ObjectServer
from shared import saving

from kvkeep import Snapshot
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SharedSessions


@pytest.mark.parametrize(
    ("kills", "tokens"),
    [
        (3, 64),  # 1.5 MB, in one request
        (2, 512),  # 12 MB, in several
        pytest.param(200, 64, marks=pytest.mark.slow),
        pytest.param(100, 512, marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_the_old_session_or_the_new_one(
    s3: ObjectServer, s3_url: str, smollm2_folder: Path, kills: int, tokens: int
) -> None:
    random_times, sessions = random.Random(tokens), SharedSessions(open_object_store(s3_url))
    with _start_savers(s3_url, smollm2_folder, tokens) as process:
        last_done = killed = 0
        while killed < kills or not last_done:  # on a busy machine, the first kills come early
            killed += 1
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{random_times.uniform(0.0, 0.4 * tokens**0.5 / 8)}\n")
            process.stdin.flush()
            events = process.stdout.readline().split()
            begun = max([int(word[1:]) for word in events if word[0] == "+"], default=last_done)
            last_done = max([int(word[1:]) for word in events if word[0] == "="], default=last_done)
            if not begun:
                continue  # killed before the first save
            version = sessions.objects_of("one").head()
            assert version is not None
            if not version.head.snapshot:
                assert last_done == 0
                continue
            snapshot = Snapshot.load(sessions.existing_path("one"))  # verifies every byte
            while snapshot.notes["number"] != version.head.gen:
                # The server completed a request of the killed process in between.
                assert snapshot.notes["number"] == version.head.gen + 1 == begun
                version = sessions.objects_of("one").head()
                assert version is not None
            assert snapshot.notes["number"] in (last_done, begun)
            last_done = snapshot.notes["number"]
    assert last_done > 0
    snapshot_count = sum(
        1 for stored in sessions.store.list_objects("") if stored.key.endswith(".kvkeep")
    )
    names = _sweep_after_expiry(sessions)
    assert snapshot_count == len(names) + 1
    assert Snapshot.load(sessions.existing_path("one")).notes["number"] == last_done


def _start_savers(url: str, model: Path, tokens: int) -> "subprocess.Popen[str]":
    script = [sys.executable, saving.__file__, url, str(model), str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _sweep_after_expiry(sessions: SharedSessions) -> list[str]:
    """Sweep as soon as the lease of the last killed process has expired."""
    while True:
        version = sessions.objects_of("one").head()
        assert version is not None
        removed = sessions.sweep()
        after = sessions.objects_of("one").head()
        assert after is not None
        if after.head.epoch > version.head.epoch:
            return removed
