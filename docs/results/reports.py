"""Draw the reports that are committed here anew: `make reports`, or `python docs/results/reports.py [FOLDER...]`.

Every folder with a campaign.tar.xz and a report.html gets report.html and brief.md of this release, drawn from the
archive's records; folders of one machine named offload-MODEL get each other's break-even over prefix lengths. verdict.json stays as it is; where today's differs from it in its word, that is said and the exit
status is 1.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.lengths import fit_campaign
from kvtrial.analysis.reproduce import Archive

HERE = Path(__file__).resolve().parent
WRITTEN = ("report.html", "brief.md")


def others_of_the_machine(folder: Path) -> list[Path]:
    """The folders with other models' campaigns of the same machine: offload-MODEL, with its archive."""
    found = sorted(path.parent for path in folder.parent.glob("offload-*/campaign.tar.xz"))
    return [other for other in found if other != folder] if folder in found else []


def unpacked(folder: Path, root: Path) -> tuple[Path, Archive]:
    """A folder's campaign as the commands on the page have it, results/CAMPAIGN at the root, and where it is kept."""
    with tempfile.TemporaryDirectory(dir=root) as scratch, tarfile.open(folder / "campaign.tar.xz") as archive:
        archive.extractall(scratch, filter="data")
        (found,) = Path(scratch).glob("**/campaign.json")
        directory = root / "results" / json.loads(found.read_text())["campaign"]
        member = found.parent.relative_to(scratch).as_posix()
        shutil.move(found.parent, directory)
    return directory, Archive(str((folder / "campaign.tar.xz").relative_to(HERE.parents[1])), member)


def drawn(folder: Path) -> tuple[dict[str, bytes], str]:
    """What of one folder's report this release draws, by file, and the word of its verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "results").mkdir()
        (root / "experiment.yml").touch()
        archives = dict(unpacked(each, root) for each in (folder, *others_of_the_machine(folder)))
        directory, *beside = archives
        verdict = campaigns.write_outputs(
            directory,
            beside=[fit for other in beside for fit in fit_campaign(other)],
            arguments=["--beside", *map(str, beside)] if beside else [],
            archives=archives,
        )
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
