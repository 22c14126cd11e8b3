"""The offline verifier needs neither Django nor a database, nor pyarrow for JSON lines."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_imports_no_framework_and_no_database() -> None:
    program = (
        "import controlplane.verify, sys; names = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(names & {'django', 'rest_framework', 'psycopg', 'sqlite3', 'nats',"
        " 'pyarrow', 'obstore', 'channels'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.stdout.strip() == "[]"
