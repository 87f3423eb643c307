"""Sources whose samples are records with named parts: Parquet, `datasets` folders, WebDataset and Energon shards.

Each gives the samples in the order in which its own library reads them. Free of torch and numpy.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.sources import BadSamples
from engine.errors import UserError
from engine.schema import Data

if TYPE_CHECKING:
    from engine.data.formats.records import Records

RECORDS = {
    "parquet": "engine.data.formats.parquet:ParquetCorpus",
    "datasets": "engine.data.formats.arrow:DatasetsCorpus",
    "webdataset": "engine.data.formats.shards:WebDatasetCorpus",
    "energon": "engine.data.formats.shards:EnergonCorpus",
}
PACKAGES = {"parquet": "pyarrow", "datasets": "datasets"}


def check_package(kind: str) -> None:
    """Raise UserError if the package that reads this kind is not installed. Imports nothing."""
    package = PACKAGES.get(kind)
    if package and find_spec(package) is None:
        raise UserError(
            f"data={kind} needs the package {package}, which is not installed; add it: uv sync --extra formats"
        )


def open_records(data: Data, cache: Path, bad: BadSamples) -> Records:
    """The corpus of a record format. Raises UserError."""
    check_package(data.name)
    module, _, name = RECORDS[data.name].partition(":")
    return getattr(import_module(module), name)(data, cache, bad)
