"""What a host's facts show: who can reach the server, what its memory is bounded by, what was left over."""

from collections.abc import Iterator

import msgspec

from kvtrial.analysis.check_arms import loopback
from kvtrial.analysis.observe.capacity import Told
from kvtrial.analysis.observe.configuration import Configuration
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed, plural
from kvtrial.analysis.reserve import GIB, LEAST_RESERVE_BYTES, ram_reserve
from kvtrial.record.observed import HostFacts
from kvtrial.record.oom import MemoryCounters, killed_others, tell_apart
from kvtrial.record.versions import data, within


class Guarded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefixes of paths that --api-key guards in versions [since, until)."""

    prefixes: list[str]
    since: str | None = None
    until: str | None = None


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route that answers without a key, and what it gives."""

    route: str
    gives: str
    since: str | None = None
    until: str | None = None


class RouteTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data/routes.yml`."""

    guarded_prefixes: list[Guarded]
    never_guarded: list[Route]
    development: list[str]


def exposure(facts: HostFacts | None, configuration: Configuration | None, version: str | None) -> Iterator[Finding]:
    """Where the server listens, and what answers there without a key."""
    addresses = _addresses(facts, configuration)
    if addresses is None:
        return
    reachable = [address for address in addresses if not loopback(address.rsplit(":", 1)[0])]
    if not reachable:
        return
    table = data("routes", RouteTable)
    env = configuration.launch.env if configuration else facts.env if facts else {}
    key = bool(env.get("VLLM_API_KEY")) or (configuration is not None and "api-key" in configuration.parsed.options)
    development = env.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0")
    open_routes = [
        route.route for route in table.never_guarded if version is None or within(version, route.since, route.until)
    ]
    guarded = next(
        (row.prefixes for row in table.guarded_prefixes if version and within(version, row.since, row.until)), None
    )
    if key:
        covers = f"--api-key guards {listed(guarded)} only" if guarded else "--api-key guards some prefixes only"
        said = f"{covers}; {listed(open_routes, 8)} answer anybody"
    else:
        said = f"no API key is set, so every route answers anybody, /v1 among them ({listed(open_routes, 8)} always do)"
    if development:
        said += f"; VLLM_SERVER_DEV_MODE is on, so {listed(table.development)} do too"
    yield Finding(
        "dev_mode_exposed" if development else "routable_bind",
        "warn",
        f"The server listens beyond loopback ({listed(reachable)}): {said}.",
        {"addresses": reachable, "api_key": key, "development": development, "open_routes": open_routes},
        ("Unset VLLM_SERVER_DEV_MODE, and bind to 127.0.0.1 " if development else "Bind to 127.0.0.1 ")
        + "behind a proxy that lets only the routes through that are wanted, or close the port in the firewall.",
        "seen" if facts is not None and facts.listening else "inferred",
    )


def memory(facts: HostFacts, told: Told) -> Iterator[Finding]:
    """RAM, /dev/shm, cgroup and what the kernel killed."""
    yield from _killed(facts)
    left = [file for file in facts.shm_files if file.mapped is False]
    if left:
        total = sum(file.size_bytes for file in left)
        yield Finding(
            "shm_left_over",
            "warn",
            f"{plural(len(left), 'file')} of a CPU tier in /dev/shm that no process maps "
            f"({listed([file.path for file in left], 3)}): {total:,} B of RAM held by nobody.",
            {"files": [file.path for file in left], "bytes": total},
            "Remove them once no process maps them (`fuser FILE` shows none). 0.29 and newer leave none; stop a "
            "server by "
            "SIGTERM and wait.",
        )
    size = told.tier_bytes
    if size and facts.dev_shm_total_bytes is not None and facts.dev_shm_total_bytes < size:
        yield Finding(
            "dev_shm_too_small",
            "warn",
            f"/dev/shm is {facts.dev_shm_total_bytes:,} B ({facts.dev_shm_total_bytes / GIB:.1f} GiB), smaller than "
            f"the "
            f"tier of {size:,.0f} B ({size / GIB:.1f} GiB) that lies in it from 0.27 on.",
            {"dev_shm_total_bytes": facts.dev_shm_total_bytes, "tier_bytes": size},
            "Enlarge /dev/shm (container --shm-size or --ipc=host, else remount) or take a smaller tier.",
        )
    limit, used = facts.cgroup_limit_bytes, facts.cgroup_used_bytes
    if limit is not None and size and limit < size + LEAST_RESERVE_BYTES:
        yield Finding(
            "cgroup_limit_near",
            "warn",
            f"The server's cgroup is limited to {limit:,} B ({limit / GIB:.1f} GiB); a tier of {size:,.0f} B counts "
            f"to it "
            f"and leaves {(limit - size) / GIB:.1f} GiB for the engine"
            + (f"; {used:,} B are used now" if used is not None else "")
            + ".",
            {"cgroup_limit_bytes": limit, "cgroup_used_bytes": used, "tier_bytes": size},
            "Raise MemoryMax= of the unit (--memory of the container), or take a smaller tier.",
        )
    ram, free = facts.ram_total_bytes, facts.ram_available_bytes
    if ram is not None and free is not None and free < (reserve := ram_reserve(ram)):
        yield Finding(
            "ram_short",
            "warn",
            f"{free / GIB:.1f} of {ram / GIB:.1f} GiB of RAM are available, less than the reserve of "
            f"{reserve / GIB:.1f} GiB.",
            {"ram_available_bytes": free, "ram_total_bytes": ram, "reserve_bytes": reserve},
            "Take a smaller tier, or free memory.",
        )
    for gpu in facts.gpus:
        if gpu.other_bytes:
            yield Finding(
                "gpu_shared",
                "warn",
                f"{gpu.other_bytes / GIB:.1f} GiB of {gpu.name} are held by processes that are not this server's.",
                {"other_bytes": gpu.other_bytes},
                "Find them with nvidia-smi; a left-over EngineCore of a killed server is one of the usual ones.",
            )


def _addresses(facts: HostFacts | None, configuration: Configuration | None) -> list[str] | None:
    if facts is not None and facts.listening:
        port = configuration.parsed.text("port") if configuration else None
        listening = [one for one in facts.listening if port is None or str(one.port) == port] or facts.listening
        return list(dict.fromkeys(f"{one.address}:{one.port}" for one in listening))
    if configuration is None:
        return None
    if configuration.parsed.text("uds"):
        return []
    port = configuration.parsed.text("port") or "8000"
    return [f"{configuration.parsed.text('host') or '0.0.0.0'}:{port}"]


def another_process_killed(lines: list[str]) -> Iterator[Finding]:
    """What the kernel killed beside the server: the server did not die of it, and RAM was short all the same."""
    if lines:
        yield Finding(
            "another_process_killed",
            "warn",
            f"The kernel killed {plural(len(lines), 'process', 'processes')} by its name none of vLLM's, for lack of "
            f"memory: '{lines[-1].strip()}'. The server did not end by it.",
            {"lines": len(lines)},
            "Look what takes the host's RAM; the next one killed may be the server, the largest process there.",
        )


def _killed(facts: HostFacts) -> Iterator[Finding]:
    none = MemoryCounters(None, None, None)
    others = killed_others(facts.kernel_lines)
    yield from another_process_killed(others)
    told = tell_apart(None, none, none, facts.kernel_lines)
    kills = facts.cgroup_oom_kills or 0
    if told.kind == "none" and not kills:
        return
    evidence = told.evidence or f"memory.events of the cgroup counts {kills} kills"
    kind = told.kind if told.kind != "none" else "cgroup_limit"
    sentence, do = (
        (told.sentence, told.do)
        if told.kind != "none"
        else (
            "The memory limit of the server's cgroup was reached and a process in it was killed; this is no "
            "preemption.",
            "Raise the limit (MemoryMax= of the unit, --memory of the container), or take a smaller tier.",
        )
    )
    yield Finding(f"out_of_memory_{kind}", "warn", f"{sentence} By: {evidence}.", {"cgroup_oom_kills": kills}, do)
