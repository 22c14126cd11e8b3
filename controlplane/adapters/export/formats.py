"""The formats by name. Parquet's library is imported only where Parquet is asked for."""

from controlplane.adapters.export.csvfile import Csv
from controlplane.adapters.export.jsonl import Jsonl
from controlplane.adapters.export.ocsf import Ocsf
from controlplane.application.exports import ExportError, Format

FORMATS = ("jsonl", "csv", "parquet", "ocsf")


def format_of(name: str, log: str, formula_safe: bool = True) -> Format:
    """Raises ExportError for a name that is unknown, or whose library is not installed."""
    if name == "csv":
        return Csv(log, formula_safe)
    if name == "parquet":
        try:
            from controlplane.adapters.export.parquet import Parquet
        except ImportError as error:
            raise ExportError(
                "Parquet needs pyarrow: pip install 'engine-controlplane[export]'"
            ) from error
        return Parquet(log)
    known: dict[str, type[Jsonl] | type[Ocsf]] = {"jsonl": Jsonl, "ocsf": Ocsf}
    if name not in known:
        raise ExportError(f"There is no format {name}; there are {', '.join(FORMATS)}.")
    return known[name](log)
