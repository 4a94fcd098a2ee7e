# Licensed under the Apache License, Version 2.0
"""vLLM servers that run on a host, as /proc, cgroups and their own ports tell. Standard library only, Python 3.8 on.

Nothing here changes anything or sends a request to a model. `proc` and the like are parameters so that tests can pass a
made-up machine. Secrets never leave these functions: values of keys and tokens are replaced where they are read.
"""

from __future__ import annotations

import base64
import glob
import http.client
import json
import os
import re
import socket
import ssl
import time
import zlib

from ansible_collections.kvtrial.vllm.plugins.module_utils import processes

REDACTED = "<redacted>"
API_MODULE = "vllm.entrypoints.openai.api_server"
KEPT_ENV = re.compile(r"^(VLLM_|PYTORCH_|CUDA_|PROMETHEUS_MULTIPROC_DIR$)")
SECRET_NAME = re.compile(r"(api[-_]?key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
NOT_SECRET = re.compile(r"(max[-_](num[-_])?(batched[-_])?tokens?|tokens?[-_]per|num[-_].*tokens?)$", re.IGNORECASE)
OPTION_WITH_SECRET = re.compile(r"(--[\w-]*(?:api[-_]key|token|secret|password))(=|\s+)(\S+)", re.IGNORECASE)
# Of API keys several may follow, up to the next option or the end of the line.
MORE_KEYS = re.compile(r"(--[\w-]*api[-_]key\s+%s)((?:[ \t]+(?![-\\])\S+)+)" % REDACTED, re.IGNORECASE)
VARIABLE_WITH_SECRET = re.compile(r"\b(\w*(?:API_KEY|_TOKEN|SECRET|PASSWORD)\w*)=(\"[^\"]*\"|'[^']*'|\S+)")
CREDENTIALS = re.compile(r"://[^/@\s]+@")
SERVICE = re.compile(r"/([^/]+\.service)(?:/|$)")
DEFAULT_PORT = 8000
MOST_PAGE_BYTES = 64 << 20
KEPT_WHOLE_BYTES = 8 << 20
ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]")


# --- secrets


def is_secret_name(name):
    """Whether an option or a variable of that name holds a secret; counts of tokens don't."""
    return bool(SECRET_NAME.search(name)) and not NOT_SECRET.search(name)


def redacted_argv(argv):
    """argv without the values of secret options (`--api-key X Y`, `--api-key=X`), nor credentials in addresses."""
    shown, hide = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            secret = is_secret_name(name)
            # An option of API keys takes several values, so every word up to the next option is one.
            hide = secret and not equals
            shown.append("%s=%s" % (name, REDACTED) if secret and equals else CREDENTIALS.sub("://***@", word))
        else:
            shown.append(REDACTED if hide else CREDENTIALS.sub("://***@", word))
    return shown


def redacted_text(text):
    """A unit or a log without the values of secret options and variables."""
    text = OPTION_WITH_SECRET.sub(r"\1\2" + REDACTED, text)
    text = MORE_KEYS.sub(r"\1 " + REDACTED, text)
    text = VARIABLE_WITH_SECRET.sub(r"\1=" + REDACTED, text)
    text = re.sub(r"('[\w]*(?:api_key|_token|secret|password)': )(\[[^\]]*\]|'[^']*')", r"\1'" + REDACTED + "'", text)
    return CREDENTIALS.sub("://***@", text)


# --- processes


def words_of(pid, proc="/proc"):
    """argv of a process; empty if it can't be read."""
    text = processes.read_text(os.path.join(proc, str(pid), "cmdline"), 1 << 18)
    return text[:-1].split("\0") if text.endswith("\0") else ([text] if text else [])


def serve_argv(words):
    """The `vllm serve ...` part of an API server's argv, None for any other process.

    Wrappers that stay (sudo, a shell with -c) are no servers: the process that they started is looked at itself.
    """
    python = os.path.basename(words[0] if words else "").startswith("python")
    at = 1 if python else 0
    if os.path.basename("".join(words[at : at + 1])) == "vllm" and words[at + 1 : at + 2] == ["serve"]:
        return words[at:]
    if python and API_MODULE in words[1:4]:
        return ["vllm", "serve", *words[words.index(API_MODULE) + 1 :]]
    return None


def find_servers(proc="/proc"):
    """[{pid, start_ticks, argv, tree}] of API servers, by pid; `tree` holds the pids of it and its descendants."""
    stats = {pid: stat for pid in processes.all_pids(proc) for stat in [processes.read_stat(pid, proc)] if stat}
    stats = {pid: stat for pid, stat in stats.items() if stat["state"] not in ("Z", "X")}
    argvs = {pid: serve_argv(words_of(pid, proc)) for pid in stats}
    servers = [pid for pid in sorted(stats) if argvs[pid] and not has_ancestor(pid, stats, argvs)]
    children = {}
    for pid, stat in stats.items():
        children.setdefault(stat["parent"], []).append(pid)
    return [
        {"pid": pid, "start_ticks": stats[pid]["start_ticks"], "argv": argvs[pid], "tree": tree_of(pid, children)}
        for pid in servers
    ]


def has_ancestor(pid, stats, argvs):
    """Whether an ancestor of `pid` is an API server: a forked worker has its argv until it names itself."""
    seen = {pid}
    pid = stats[pid]["parent"]
    while pid in stats and pid not in seen:
        if argvs.get(pid):
            return True
        seen.add(pid)
        pid = stats[pid]["parent"]
    return False


def tree_of(pid, children):
    """`pid` and its descendants, ascending."""
    found, due = set(), [pid]
    while due:
        pid = due.pop()
        if pid not in found:
            found.add(pid)
            due += children.get(pid, [])
    return sorted(found)


def option(argv, name):
    """The last value of a long option in argv, None if it isn't given."""
    value = None
    for at, word in enumerate(argv):
        plain, equals, rest = word.partition("=")
        if plain.replace("_", "-") == "--" + name:
            value = rest if equals else (argv[at + 1] if at + 1 < len(argv) else "")
    return value


def address_of(argv):
    """{scheme, host, port} under which a server can be asked from its own machine, None for a Unix socket."""
    if option(argv, "uds"):
        return None
    host, port = option(argv, "host") or "", option(argv, "port") or ""
    return {
        "scheme": "https" if option(argv, "ssl-certfile") else "http",
        "host": "127.0.0.1" if host in ANY_ADDRESS else host.strip("[]"),
        "port": int(port) if port.isdigit() else DEFAULT_PORT,
    }


def environment_of(pid, proc="/proc"):
    """The variables that matter of a process's environment, without secrets; {} where it can't be read."""
    text = processes.read_text(os.path.join(proc, str(pid), "environ"), 1 << 20)
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {
        name: REDACTED if is_secret_name(name) else CREDENTIALS.sub("://***@", value)
        for name, _, value in pairs
        if KEPT_ENV.match(name)
    }


def unit_of(pid, proc="/proc"):
    """The system service that a process belongs to, None for one of a session, a container or nothing."""
    for line in processes.read_text(os.path.join(proc, str(pid), "cgroup"), 1 << 16).splitlines():
        found = SERVICE.findall(line.split(":", 2)[-1]) if line.count(":") >= 2 else []
        if found and not found[-1].startswith("user@"):
            return found[-1]
    return None


def log_file_of(pid, proc="/proc"):
    """The file that a process writes its standard output to, None where that is no file."""
    for number in ("1", "2"):
        try:
            path = os.readlink(os.path.join(proc, str(pid), "fd", number))
        except OSError:
            continue
        if path.startswith("/") and not path.startswith("/dev/") and os.path.isfile(path):
            return path
    return None


# --- sockets


def listening(tree, proc="/proc"):
    """[{address, port, process}] of TCP sockets that the processes of a tree listen on; needs root for another's."""
    owners = {}
    for pid in tree:
        try:
            names = os.listdir(os.path.join(proc, str(pid), "fd"))
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(os.path.join(proc, str(pid), "fd", name))
            except OSError:
                continue
            if target.startswith("socket:["):
                owners.setdefault(target[8:-1], pid)
    found = set()
    for table in ("tcp", "tcp6"):
        text = processes.read_text(os.path.join(proc, str(tree[0]) if tree else "self", "net", table), 1 << 24)
        for line in text.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and fields[9] in owners:
                address, port = fields[1].rsplit(":", 1)
                name = processes.read_text(os.path.join(proc, str(owners[fields[9]]), "comm"), 64).strip()
                found.add((plain_address(address), int(port, 16), name))
    return [{"address": address, "port": port, "process": name or None} for address, port, name in sorted(found)]


def plain_address(hexadecimal):
    """An address of /proc/net/tcp as people write it: 32-bit words in the host's byte order, which is little-endian."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    packed = b"".join(words)
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        # An IPv4 address on a socket of both families: whether it is loopback is the IPv4 address's matter.
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)


# --- memory


def cgroup_memory(pid, proc="/proc", cgroups="/sys/fs/cgroup"):
    """{limit_bytes, used_bytes, oom_kills} of a process's cgroup, the smallest limit from it upwards; None: unknown."""
    paths = {}
    for line in processes.read_text(os.path.join(proc, str(pid), "cgroup"), 1 << 16).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and (fields[1] == "" or "memory" in fields[1].split(",")):
            paths["v1" if fields[1] else "v2"] = fields[2]
    for version, root, limit_name, used_name, events in (
        ("v1", os.path.join(cgroups, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
        ("v2", cgroups, "memory.max", "memory.current", "memory.events"),
    ):
        if version not in paths or not os.path.isdir(root + paths[version]):
            continue
        own = root + paths[version]
        found = {"limit_bytes": None, "used_bytes": number_in(own, used_name), "oom_kills": None}
        for line in processes.read_text(os.path.join(own, events)).splitlines():
            if line.startswith("oom_kill "):
                found["oom_kills"] = int(line.split()[1])
        folder = own
        while folder.startswith(root):
            limit = number_in(folder, limit_name)
            # Without a limit the first version says a number near 2**63.
            if limit is not None and limit < 1 << 60:
                found["limit_bytes"] = min(limit, found["limit_bytes"] or limit)
            folder = os.path.dirname(folder)
        if found["used_bytes"] is not None:
            return found
    return {"limit_bytes": None, "used_bytes": None, "oom_kills": None}


def number_in(folder, name):
    """The number that a file holds, None for none."""
    text = processes.read_text(os.path.join(folder, name), 64).strip()
    return int(text) if text.isdigit() else None


def shared_memory(pid, proc="/proc"):
    """{total_bytes, free_bytes} of /dev/shm as a process sees it, by its own root where that can be read."""
    for path in (os.path.join(proc, str(pid), "root/dev/shm"), "/dev/shm"):
        try:
            stat = os.statvfs(path)
        except OSError:
            continue
        return {"total_bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}
    return {"total_bytes": None, "free_bytes": None}


def gpus_seen(gpus, used_by, tree):
    """GPUs as the facts of a server name them. `used_by`: processes on GPUs; `other_bytes`: of those not in `tree`."""
    found = []
    for gpu in gpus:
        here = [entry for entry in used_by if entry["gpu_uuid"] == gpu["uuid"] and entry["memory_bytes"] is not None]
        other = sum(entry["memory_bytes"] for entry in here if entry["pid"] not in tree)
        found.append(
            {
                "name": gpu["name"],
                "vram_total_bytes": gpu["memory_total_bytes"],
                "vram_used_bytes": gpu["memory_used_bytes"],
                # A container hides whose the processes are; then nobody knows.
                "other_bytes": other if here else None,
            }
        )
    return found


# --- what the server itself says


def get(address, path, timeout=10.0, limit=MOST_PAGE_BYTES):
    """(status, body bytes) of a GET. Raises OSError, HTTPException, ValueError for a body beyond `limit`."""
    if address["scheme"] == "https":
        # A look from the machine itself at its own server, whose certificate is for another name.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address["host"], address["port"], timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(address["host"], address["port"], timeout=timeout)
    try:
        headers = {"Accept-Encoding": "identity", "User-Agent": "kvtrial-observe", "Connection": "close"}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read(limit + 1)
    finally:
        connection.close()
    if len(body) > limit:
        raise ValueError("the answer has more than %d bytes" % limit)
    return response.status, body


def page(address, timeout=30.0):
    """{text, bytes, monotonic_seconds, error, status} of /metrics. `text` is packed, None where `error` says why.

    The time is the middle of the request. A page beyond 8 MiB is sent without its histograms' buckets.
    """
    began = time.monotonic()
    found = {"text": None, "bytes": 0, "monotonic_seconds": began, "error": None, "status": None}
    try:
        status, body = get(address, "/metrics", timeout)
    except (OSError, http.client.HTTPException, ValueError) as error:
        found["error"] = "%s: %s" % (type(error).__name__, error)
        return found
    found.update(monotonic_seconds=(began + time.monotonic()) / 2, bytes=len(body), status=status)
    if status != 200:
        found["error"] = "HTTP status %d" % status
        return found
    if len(body) > KEPT_WHOLE_BYTES:
        kept = [line for line in body.split(b"\n") if b"_bucket{" not in line]
        body = b"\n".join(kept)
    found["text"] = pack(body)
    return found


def pack(body):
    """Bytes as text that JSON carries, small."""
    return base64.b64encode(zlib.compress(body, 6)).decode("ascii")


def unpack(text):
    """The bytes that `pack` was given."""
    return zlib.decompress(base64.b64decode(text))


def said(address, path, timeout=5.0):
    """The JSON that a path answers, or {status} or {error} where it answers something else."""
    try:
        status, body = get(address, path, timeout, 1 << 20)
        return json.loads(body.decode("utf-8")) if status == 200 else {"status": status}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


def tail(path, most_bytes, head_bytes=1 << 16):
    """Beginning and end of a log, in whole lines; None if it can't be read. The beginning tells what was started."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= most_bytes + head_bytes:
                return file.read().decode("utf-8", "replace")
            first = file.read(head_bytes)
            file.seek(size - most_bytes)
            last = file.read(most_bytes)
    except OSError:
        return None
    first, last = first[: first.rfind(b"\n") + 1], last[last.find(b"\n") + 1 :]
    return (first + last).decode("utf-8", "replace")


def shm_files(directory="/dev/shm", mapped=None):
    """[{path, size_bytes, mapped}] of tiers' files; `mapped`: paths that some process maps, None where not known."""
    found = []
    for path in sorted(glob.glob(os.path.join(directory, "vllm_offload_*"))):
        try:
            size = os.stat(path).st_size
        except OSError:
            continue
        found.append({"path": path, "size_bytes": size, "mapped": None if mapped is None else path in mapped})
    return found
