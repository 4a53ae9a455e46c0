"""How long the machine itself stops a process that does nothing but look at the clock.

    python -m benchmarks.stalls --seconds 40

What is measured here can stop a token at any time, whatever program writes it: on a virtual machine
that shares its cores it is the least that the slowest of many tokens may take.
"""

import multiprocessing
import time

import click

NOTED = 0.001  # seconds


def gaps(seconds: float) -> list[float]:
    """All times longer than `NOTED` between two looks at the clock, in seconds."""
    found, last = [], time.perf_counter()
    end = last + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > NOTED:
            found.append(now - last)
        last = now
    return found


@click.command()
@click.option("--seconds", default=40.0, show_default=True, help="How long to look.")
@click.option("--processes", default=multiprocessing.cpu_count(), show_default=True)
def main(seconds: float, processes: int) -> None:
    """Look at the clock with one process for each core, and tell the longest stops."""
    with multiprocessing.Pool(processes) as pool:
        each = pool.map(gaps, [seconds] * processes)
    for index, found in enumerate(each):
        longest = ", ".join(f"{1000 * gap:.1f}" for gap in sorted(found, reverse=True)[:5])
        long = sum(gap > 0.005 for gap in found)
        click.echo(
            f"process {index}: stopped {len(found)} times for over {1000 * NOTED:g} ms and {long} "
            f"times for over 5 ms in {seconds:g} s; longest: {longest or 'none'} ms"
        )


if __name__ == "__main__":
    main()
