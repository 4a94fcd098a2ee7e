"""The one error a user may see."""


class UnusableInput(Exception):
    """Input that can't be used. The message is one sentence: the value, what is allowed, what to do."""
