"""Lists of CPUs as Linux writes them: `0-3,8,10-11`."""


def cpu_list(text: str) -> set[int]:
    """The CPUs of a list; an empty text is no CPU. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs")
        low, high = int(first), int(last or first)
        if low > high or high > 65535:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return cpus


def as_list(cpus: set[int]) -> str:
    """The shortest list of `cpus`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
