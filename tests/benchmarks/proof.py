"""Sealing, verifying and exporting a long ledger: ``python -m tests.benchmarks.proof``.

On SQLite in a folder of its own: N ended requests and N / 10 events are sealed, verified in the
store, exported in each format and verified offline, all in one run. Memory is the peak resident
size of a process that exports all of it against one that exports a tenth: a ratio near 1 says that
it does not grow with the log.
"""

import argparse
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

FORMATS = ("jsonl", "csv", "parquet", "ocsf")
BATCH = 10_000


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fill(records: int) -> None:
    """Through the ledger's own statements, in batches, and a tenth as many events."""
    from controlplane import bootstrap
    from tests.proof.filling import fill_events, fill_ledger

    for first in range(1, records + 1, BATCH):
        fill_ledger(min(BATCH, records - first + 1), seed=first, first=first)
    fill_events(bootstrap.event_store(), records // 10)


def seal() -> None:
    from controlplane import bootstrap

    while bootstrap.sealer().step(bootstrap.sealed_logs(), now=True):
        pass


def export(folder: Path, form: str, upto: int | None) -> None:
    from controlplane import bootstrap
    from controlplane.adapters.export.destinations import Folder
    from controlplane.adapters.export.formats import format_of
    from controlplane.application.export_job import ExportJob
    from controlplane.application.exports import Filters

    source = bootstrap.export_source("requests")
    job = ExportJob(source, format_of(form, "requests"), Filters(), Folder(folder))
    for _ in job.run(upto):
        pass


def peak_mib(arguments: list[str]) -> float:
    """Peak resident MiB of this program run again with ``arguments``."""
    command = [sys.executable, "-m", "tests.benchmarks.proof", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1])


def _peak_kib() -> int:
    """Of this program's own memory: ``ru_maxrss`` still counts what forked it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def verify_store() -> float:
    """Records a second, as ``manage.py verify`` says itself; raises if it finds anything."""
    from django.core.management import call_command

    said = io.StringIO()
    call_command("verify", stdout=said)
    return float(said.getvalue().split()[-2].replace(",", ""))


def verify_offline(folder: Path) -> float:
    """Records a second, as the verifier says itself; fails if it finds anything."""
    from controlplane import bootstrap

    command = [sys.executable, "-m", "controlplane.verify", str(folder)]
    command += ["--key", bootstrap.signer().public.line]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-2].replace(",", ""))


def measured(
    records: int, folder: Path, formats: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    figures: dict[str, float] = {}
    fill(records)
    figures["seal_records_per_s"] = records * 1.1 / timed(seal)
    figures["verify_store_records_per_s"] = verify_store()
    for form in formats:
        out = folder / form
        figures[f"export_{form}_records_per_s"] = records / timed(lambda: export(out, form, None))  # noqa: B023
        figures[f"verify_{form}_records_per_s"] = verify_offline(out)
        shutil.rmtree(out)
    ratios = {}
    for form in formats:
        peaks = [
            peak_mib(
                ["--export", form, "--upto", str(upto), "--out", str(folder / f"{form}{upto}")]
            )
            for upto in (records // 10, records)
        ]
        figures[f"export_{form}_peak_mib"] = peaks[1]
        ratios[f"export_{form}_memory_whole_over_tenth"] = peaks[1] / peaks[0]
        shutil.rmtree(folder / f"{form}{records}")
    return figures, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of them, with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--export", choices=FORMATS, help="only export, and print the peak MiB")
    parser.add_argument("--upto", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("ENGINE_DATA_DIR") or tempfile.mkdtemp(prefix="bench-proof-"))
    if options.export is None:
        folder = Path(tempfile.mkdtemp(prefix="bench-proof-"))
    os.environ.update(ENGINE_DATA_DIR=str(folder), ENGINE_DATABASE_URL="")
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.config.settings"
    import django

    django.setup()
    if options.export is not None:
        export(options.out, options.export, options.upto)
        print(_peak_kib() / 1024)
        return
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    try:
        figures, ratios = measured(options.records, folder, options.formats.split(","))
    finally:
        shutil.rmtree(folder)
    for name, value in {**figures, **ratios}.items():
        print(f"{name:45} {value:12,.2f}")
    if options.json:
        found = {"name": "proof", "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({**found, "ratios": ratios, "figures": figures}))


if __name__ == "__main__":
    main()
