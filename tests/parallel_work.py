"""What workers compute in tests: of a module that every engine's workers can import, and that imports little."""

from __future__ import annotations

import os
import signal
import time

from tasks.contracts import InputError


def square(number: int) -> tuple[int, int]:
    """number² and the process; the first item is slow, so that later ones are done before it."""
    time.sleep(0.3 if number == 0 else 0.02)
    return number**2, os.getpid()


def refuse_three(number: int) -> int:
    if number == 3:
        raise InputError("three cannot be used: expected any other number")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def threads(_number: int) -> int:
    import torch

    return torch.get_num_threads()


def slow(number: int) -> int:
    time.sleep(60 if number > 1 else 0)
    return number
