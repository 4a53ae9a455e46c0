"""A session that is saved to S3 while the process is killed is the old one or the new one."""

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
        (6, 64),  # 1.5 MB, in one request
        (4, 512),  # 12 MB, in several
        pytest.param(200, 64, marks=pytest.mark.slow),
        pytest.param(100, 512, marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_the_old_session_or_the_new_one(
    s3: ObjectServer, s3_url: str, smollm2_folder: Path, kills: int, tokens: int
) -> None:
    chance, sessions = random.Random(tokens), SharedSessions(open_object_store(s3_url))
    with _savers(s3_url, smollm2_folder, tokens) as savers:
        done = 0
        for _ in range(kills):
            assert savers.stdin is not None
            assert savers.stdout is not None
            savers.stdin.write(f"{chance.uniform(0.0, 0.4 * tokens**0.5 / 8)}\n")
            savers.stdin.flush()
            said = savers.stdout.readline().split()
            begun = max([int(word[1:]) for word in said if word[0] == "+"], default=done)
            done = max([int(word[1:]) for word in said if word[0] == "="], default=done)
            if not begun:
                continue  # killed before the first save
            place = sessions.objects_of("one").head()
            assert place is not None
            if not place.head.snapshot:
                assert done == 0
                continue
            snapshot = Snapshot.load(sessions.existing("one"))  # every byte is looked at
            assert snapshot.notes["number"] == place.head.gen
            assert snapshot.notes["number"] in (done, begun)
            done = snapshot.notes["number"]
    assert done > 0
    left = sum(1 for stored in sessions.objects.list_objects("") if stored.key.endswith(".kvkeep"))
    names = _swept(sessions)
    assert left == len(names) + 1
    assert Snapshot.load(sessions.existing("one")).notes["number"] == done


def _savers(url: str, model: Path, tokens: int) -> "subprocess.Popen[str]":
    script = [sys.executable, saving.__file__, url, str(model), str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _swept(sessions: SharedSessions) -> list[str]:
    """Once the lease of the last one that was killed has run out."""
    while True:
        version = sessions.objects_of("one").head()
        assert version is not None
        swept = sessions.sweep()
        after = sessions.objects_of("one").head()
        assert after is not None
        if after.head.epoch > version.head.epoch:
            return swept
