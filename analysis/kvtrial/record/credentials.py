"""What a user's name and password look like in an address."""

import re

CREDENTIALS = re.compile(r"(://)[^/\s\"']+@")


def without_credentials(text: str) -> str:
    """A text with what stands before the @ of addresses (`http://user:password@host`) hidden."""
    return CREDENTIALS.sub(r"\1***@", text)
