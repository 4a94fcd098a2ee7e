"""A history for whoever shows it: from a store's folder, or from the file that `kvtrial history --json` wrote."""

from pathlib import Path

import msgspec

from kvtrial.analysis.history.model import History
from kvtrial.record.errors import UnusableInput
from kvtrial.record.version import refuse_newer


def read_history(path: Path, protocol: str | None = None) -> History:
    """The history at `path`; of a store, that of `protocol` alone. Raises UnusableInput where it is none, or newer."""
    if path.is_dir():
        # Only a store takes pandas to read.
        from kvtrial.analysis.history.reading import read

        return read(path, protocol=protocol)
    try:
        raw = path.read_bytes()
        keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if "schema_version" in keys:
            refuse_newer(msgspec.json.decode(keys["schema_version"], type=str), str(path))
        return msgspec.json.decode(raw, type=History)
    except OSError as error:
        raise UnusableInput(
            f"{path} can't be read ({error.strerror}); give a store (results/history) or an existing file."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableInput(
            f"{path} is no history of campaigns ({error}); give a store, or what kvtrial history --json wrote."
        ) from None
