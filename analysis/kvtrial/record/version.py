"""Versions of the project's own schemas."""

from kvtrial.record.errors import UnusableInput

SCHEMA_VERSION = "1.0"
"""Version of every schema this release writes: protocol, plan, record, verdict."""


def refuse_newer(schema_version: str, what: str) -> None:
    """Raise UnusableInput if `schema_version` ("major.minor") has a newer major than this release reads."""
    major, _, minor = schema_version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise UnusableInput(f'{what} has schema_version "{schema_version}"; it must look like "{SCHEMA_VERSION}".')
    if int(major) > int(SCHEMA_VERSION.split(".")[0]):
        raise UnusableInput(
            f"{what} has schema_version {schema_version}, this kvtrial reads up to major "
            f"{SCHEMA_VERSION.split('.')[0]}; use the kvtrial that wrote it, or a newer one."
        )
