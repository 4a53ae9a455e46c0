"""Stops of the machine itself, seen by processes that only read the clock.

    python -m benchmarks.stalls --seconds 40

Such stops can delay a token of any program: on a virtual machine with shared cores they are a lower
bound of the slowest of many tokens.
"""

import multiprocessing
import time

import click

THRESHOLD = 0.001  # seconds


def gaps(seconds: float) -> list[float]:
    """Return all times above `THRESHOLD` between two readings of the clock, in seconds."""
    stalls, last = [], time.perf_counter()
    end = last + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > THRESHOLD:
            stalls.append(now - last)
        last = now
    return stalls


@click.command()
@click.option("--seconds", default=40.0, show_default=True, help="Duration.")
@click.option("--processes", default=multiprocessing.cpu_count(), show_default=True)
def main(seconds: float, processes: int) -> None:
    """Read the clock with one process per core, and print the longest stops."""
    with multiprocessing.Pool(processes) as pool:
        stalls_by_process = pool.map(gaps, [seconds] * processes)
    for index, stalls in enumerate(stalls_by_process):
        longest = ", ".join(f"{1000 * gap:.1f}" for gap in sorted(stalls, reverse=True)[:5])
        long = sum(gap > 0.005 for gap in stalls)
        click.echo(
            f"process {index}: stopped {len(stalls)} times for over {1000 * THRESHOLD:g} ms and "
            f"{long} times for over 5 ms in {seconds:g} s; longest: {longest or 'none'} ms"
        )


if __name__ == "__main__":
    main()
