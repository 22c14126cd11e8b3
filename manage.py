#!/usr/bin/env python3
"""Django's command line; ``./manage.py help`` lists the processes and tools."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    try:
        from controlplane.entrypoints.processes.command_help import Utility
    except ModuleNotFoundError:
        sys.exit("Django is missing here: run .venv/bin/python manage.py; `make run` installs it.")
    Utility(sys.argv).execute()


if __name__ == "__main__":
    main()
