"""Draw the reports that are committed here anew: `make reports`, or `python docs/results/reports.py [FOLDER...]`.

Every folder with a campaign.tar.xz and a report.html gets report.html and brief.md of this release, drawn from the
archive's records. verdict.json stays as it is; where today's differs from it in its word, that is said and the exit
status is 1.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.reproduce import Archive

HERE = Path(__file__).resolve().parent
WRITTEN = ("report.html", "brief.md")


def drawn(folder: Path) -> tuple[dict[str, bytes], str]:
    """What of one folder's report this release draws, by file, and the word of its verdict."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(folder / "campaign.tar.xz") as archive:
        archive.extractall(scratch, filter="data")
        (found,) = Path(scratch).glob("**/campaign.json")
        name = json.loads(found.read_text())["campaign"]
        member = found.parent.relative_to(scratch).as_posix()
        kept_in = Archive(str((folder / "campaign.tar.xz").relative_to(HERE.parents[1])), member)
        # As the commands on the page have it: results/CAMPAIGN, seen from the project's root.
        root = Path(scratch) / "root"
        (root / "results").mkdir(parents=True)
        (root / "experiment.yml").touch()
        shutil.move(found.parent, root / "results" / name)
        directory = root / "results" / name
        verdict = campaigns.write_outputs(directory, archive=kept_in)
        return {written: (directory / written).read_bytes() for written in WRITTEN}, verdict.verdict


def draw(folder: Path) -> bool:
    """Draw one folder's report; whether its verdict is the committed one."""
    files, word = drawn(folder)
    for written, content in files.items():
        (folder / written).write_bytes(content)
    committed = json.loads((folder / "verdict.json").read_text())["verdict"]
    sizes = ", ".join(f"{written} {(folder / written).stat().st_size:,} bytes" for written in WRITTEN)
    same = committed == word
    print(f"{folder.relative_to(HERE)}: {word}{'' if same else f', committed {committed}'}; {sizes}")
    return same


def main() -> int:
    """All folders, or those named."""
    named = [Path(given).resolve() for given in sys.argv[1:]]
    folders = named or sorted(path.parent for path in HERE.glob("*/*/campaign.tar.xz"))
    return 0 if all([draw(folder) for folder in folders if (folder / "report.html").is_file()]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
