"""What a test needs and the machine lacks: a user's run skips it, CI's fails.

skip_without("strace: apt-get install strace")
"""

import os
from typing import NoReturn

import pytest


def skip_without(needed: str) -> NoReturn:
    """``needed`` says what is missing and how to get it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have {needed}", pytrace=False)
    pytest.skip(f"needs {needed}")
