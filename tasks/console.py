"""The terminal: one way to start a step, to show progress with times, and to end with a clear error."""

from __future__ import annotations

import errno
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from safetensors import SafetensorError

from tasks.contracts import InputError
from tasks.params import ParamsError

Item = TypeVar("Item")


def run_step(main: Callable[..., None]) -> None:
    """Run a step's `main` as a command; expected errors end in one line and exit status 1, bugs in a traceback."""
    name = " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]])

    @functools.wraps(main)
    def guarded(*args: object, **options: object) -> None:
        started = time.monotonic()
        try:
            main(*args, **options)
        except (InputError, ParamsError) as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print(
                f"{name}: interrupted; nothing that existed was replaced: run again to carry on",
                file=sys.stderr,
            )
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            where = error.filename or "an output file"
            print(f"{name}: error: {error.strerror}: {where}; nothing that existed was replaced: "
                  "make room and run again", file=sys.stderr)  # fmt: skip
            raise typer.Exit(1) from None
        except SafetensorError as error:
            if "os error" not in str(error):  # safetensors wraps what the operating system says
                raise
            print(
                f"{name}: error: {error}; nothing that existed was replaced: make room and run again",
                file=sys.stderr,
            )
            raise typer.Exit(1) from None
        print(f"{name}: done in {time.monotonic() - started:.1f} s", file=sys.stderr)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(guarded)
    app()


@contextmanager
def timed(label: str) -> Iterator[None]:
    """Print how long a part took; for parts without a countable total."""
    started = time.monotonic()
    print(f"  {label} ...", file=sys.stderr, flush=True)
    yield
    print(f"  {label}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Iterate with a progress bar on a terminal, and with a line every ten seconds elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, description=f"  {label}", total=total, console=Console(stderr=True))
        return
    started = printed = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - printed > 10 or done == total:
            print(f"  {label}: {done}/{total}, {now - started:.0f} s", file=sys.stderr, flush=True)
            printed = now
