"""An engine with more sessions than the process may open files, and another one after it."""

import resource
import sys
from pathlib import Path

from engine.killed import new_engine, text, write

NUM_SESSIONS = 100


def main() -> None:
    """Create the sessions in the folder that the argument names, and count those of a restart."""
    folder = Path(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))
    with new_engine(folder, save_idle_after=1e9) as engine:
        for number in range(NUM_SESSIONS):
            engine.create(name=f"s{number}").result()
            write(engine, f"s{number}", 1, text(number, 20))
    with new_engine(folder) as engine:
        print(len(engine.sessions().result()), engine.losses)


if __name__ == "__main__":
    main()
