"""The requests of a phase, serialised before it begins: on disk (in memory while they are few), and 33 bytes each here.

The file is unlinked as soon as it is made, so that no prompt outlives the process, and read with `pread` at dispatch.
"""

import hashlib
import os
import tempfile
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import msgspec

from kvtrial.host.load.checks import check_request
from kvtrial.host.load.http1 import post_bytes
from kvtrial.host.load.sse import sha256_of_tokens
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import LoadSpec, RequestSpec

MEMORY_LIMIT_BYTES = 32 << 20
"""Fewer bytes than this stay in memory."""

_PATH = "/v1/completions"
_SHARES = 16
_DIGEST_BYTES = 32


class SpooledRequest(msgspec.Struct, frozen=True):
    """One request as it lies in the spool: its key, the sha256 of its prompt in hex, and the whole POST."""

    key: str
    prompt_sha256: str
    wire: bytes

    def prompt_text(self) -> str | None:
        """The prompt where it is text (None: token ids)."""
        prompt = msgspec.json.decode(self.wire[self.wire.index(b"\r\n\r\n") + 4 :])["prompt"]
        return prompt if isinstance(prompt, str) else None


class Spool:
    """All requests of a phase, by their number. Built from an iterable that is read once; `close` it.

    `scheduled_ns` are offsets from the start of an open loop (0 where there is none), `first` is 1 where a request
    waits for no other. Raises UnusableInput for requests that cannot be sent, OSError where the disk is full.
    """

    def __init__(self, spec: LoadSpec, requests: Iterable[RequestSpec], directory: Path | None = None) -> None:
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self._directory = directory
        self._ends = array("q", [0])
        self.scheduled_ns = array("q")
        self.first = bytearray()
        self._pauses_ns = array("q")
        self._after = array("q")
        self._followers = (array("q"), array("q"))
        prompts = hashlib.sha256()
        hashes = [array("q") for _ in range(_SHARES)]
        host = urlsplit(spec.base_url).netloc
        try:
            for request in requests:
                check_request(request, open_loop=spec.concurrency is None)
                digest = sha256_of_prompt(request)
                prompts.update(("\n" if self.first else "").encode() + digest.encode())
                identity = hash(request.key)
                hashes[identity % _SHARES].append(identity)
                self._append(request, digest, post_bytes(host, _PATH, request_body(spec.model, request)))
            if not self.first:
                raise UnusableInput("no requests are no load; give at least one request.")
            self._refuse_equal_keys(hashes)
            if self._after:
                self._find_followers()
            if self._file is not None:
                self._file.flush()
        except BaseException:
            self.close()
            raise
        self.prompts_sha256 = prompts.hexdigest()

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, number: int) -> SpooledRequest:
        begin, end = self._ends[number], self._ends[number + 1]
        if self._file is None:
            record = bytes(self._memory[begin:end])
        else:
            record = os.pread(self._file.fileno(), end - begin, begin)
        key_end = 4 + int.from_bytes(record[:4])
        wire_begin = key_end + _DIGEST_BYTES
        return SpooledRequest(record[4:key_end].decode(), record[key_end:wire_begin].hex(), record[wire_begin:])

    def followers(self, number: int) -> Iterator[tuple[int, int]]:
        """(number, pause in nanoseconds) of the requests that wait for the end of request `number`."""
        before, waiting = self._followers
        at = bisect_left(before, number)
        while at < len(before) and before[at] == number:
            yield waiting[at], self._pauses_ns[waiting[at]]
            at += 1

    def in_order_of_schedule(self) -> Iterator[int]:
        """The numbers of the requests that wait for no other, by their scheduled time, then in the order given."""
        numbers: Iterable[int] = range(len(self))
        times = self.scheduled_ns
        if any(times[number] < times[number - 1] for number in range(1, len(self))):
            numbers = array("q", sorted(numbers, key=times.__getitem__))
        return (number for number in numbers if self.first[number])

    def close(self) -> None:
        """Give the file back to the disk. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, request: RequestSpec, digest: str, wire: bytes) -> None:
        key = request.key.encode()
        record = b"".join((len(key).to_bytes(4), key, bytes.fromhex(digest), wire))
        if self._file is None and len(self._memory) + len(record) > MEMORY_LIMIT_BYTES:
            # Nobody but this process can open what has no name. It is closed by close().
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="kvtrial-spool-")  # noqa: SIM115
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += record
        else:
            self._file.write(record)
        self._ends.append(self._ends[-1] + len(record))
        self.scheduled_ns.append(round((request.scheduled_seconds or 0.0) * 1e9))
        self._pauses_ns.append(round(request.pause_seconds * 1e9))
        self.first.append(request.after is None)
        if request.after is not None:
            self._after.extend((hash(request.after), len(self.first) - 1))

    def _refuse_equal_keys(self, hashes: "list[array[int]]") -> None:
        for share in hashes:
            if len(set(share)) == len(share):
                continue
            twice = {identity for identity, count in Counter(share).items() if count > 1}
            if self._file is not None:
                self._file.flush()
            seen: set[str] = set()
            for key in (self[number].key for number in range(len(self))):
                if hash(key) in twice and key in seen:
                    raise UnusableInput(f"request key {key!r} stands twice; keys are unique within a phase.")
                if hash(key) in twice:
                    seen.add(key)

    def _find_followers(self) -> None:
        """Turn hashes of keys into numbers; refuse those that name no earlier request."""
        if self._file is not None:
            self._file.flush()
        wanted: dict[int, list[int]] = {}
        for identity, number in zip(self._after[::2], self._after[1::2], strict=True):
            wanted.setdefault(identity, []).append(number)
        before, waiting = self._followers
        for number in range(len(self)):
            for follower in wanted.pop(hash(self._key(number)), ()):
                if follower <= number:
                    raise UnusableInput(
                        f"request {self._key(follower)!r} comes after {self._key(number)!r}, which is not given before "
                        "it; give the requests of a conversation in their order."
                    )
                before.append(number)
                waiting.append(follower)
        for followers in wanted.values():
            raise UnusableInput(
                f"request {self._key(followers[0])!r} comes after a request that is not in this phase; name the key "
                "of an earlier one."
            )
        self._after = array("q")

    def _key(self, number: int) -> str:
        return self[number].key


def request_body(model: str, request: RequestSpec) -> bytes:
    """The JSON body of one request, as it is sent."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_text,
        "max_tokens": request.max_tokens,
        # Without ignore_eos a minimum would suppress the very end that was allowed.
        "min_tokens": request.max_tokens if request.ignore_eos else 0,
        "ignore_eos": request.ignore_eos,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.stop_after is not None and request.stop_token_id is not None:
        # The stop token is the last one of the answer, so it may come only after all others.
        body["min_tokens"] = request.stop_after - 1
        body["stop_token_ids"] = [request.stop_token_id]
        body["logit_bias"] = {str(request.stop_token_id): 100}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.kv_transfer_params is not None:
        body["kv_transfer_params"] = request.kv_transfer_params
    return msgspec.json.encode(body)


def sha256_of_prompt(request: RequestSpec) -> str:
    """sha256 in hex of the prompt: of its token ids as compact JSON, or of its text in UTF-8."""
    if request.prompt_token_ids is not None:
        return sha256_of_tokens(request.prompt_token_ids)
    return hashlib.sha256((request.prompt_text or "").encode("utf-8")).hexdigest()
