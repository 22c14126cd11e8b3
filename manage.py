#!/usr/bin/env python3
"""Django's command line; ``./manage.py help`` lists the processes and tools."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    try:
        from django.core.management import execute_from_command_line
    except ModuleNotFoundError:
        sys.exit("Django is missing here: run .venv/bin/python manage.py; `make run` installs it.")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
