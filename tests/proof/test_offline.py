"""The offline verifier needs neither Django nor a database, nor pyarrow for JSON lines."""

import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.application.notes import Signer
from controlplane.verify import main

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


def test_a_mistyped_path_is_not_called_tampering(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Signer.generate("engine").public.line
    for arguments, said in (
        ([str(tmp_path / "nope"), "--key", key], "There is no folder"),
        ([str(tmp_path), "--key", str(tmp_path / "nope.pub")], "No such file"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert main([str(tmp_path), "--key", key]) == 1  # a folder whose manifest is gone
