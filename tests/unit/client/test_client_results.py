"""requests.jsonl.zst: written whole or not at all, read one by one, and refused when cut or damaged."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import RequestError, RequestResult, read_results, write_results


def result(key: str, error: RequestError | None = None, gaps: int = 2) -> RequestResult:
    return RequestResult(
        key=key,
        prompt_sha256="00",
        prompt_tokens=4,
        scheduled_ns=0,
        sent_ns=1,
        first_byte_ns=2,
        first_token_ns=3,
        last_token_ns=9,
        token_gaps_us=list(range(gaps)),
        output_token_ids=[1, 2, 3],
        answer_sha256="11",
        output_tokens=3,
        cached_tokens=None,
        finish_reason="length",
        error=error,
    )


def test_what_is_written_is_read_back_with_its_phase(tmp_path: Path) -> None:
    failed = RequestError(error_class="http_status", http_status=503, detail="a\u2028b")
    pairs = [("populate", result("a")), ("return", result("b", failed))]
    write_results(tmp_path / "requests.jsonl.zst", iter(pairs))
    rows = list(read_results(tmp_path / "requests.jsonl.zst"))
    assert [row.pop("phase") for row in rows] == ["populate", "return"]
    assert [msgspec.convert(row, RequestResult) for row in rows] == [entry for _, entry in pairs]


def test_no_results_are_an_empty_file_that_can_be_read(tmp_path: Path) -> None:
    write_results(tmp_path / "r.zst", [])
    assert list(read_results(tmp_path / "r.zst")) == []


def test_a_file_larger_than_one_read_keeps_its_lines(tmp_path: Path) -> None:
    write_results(tmp_path / "r.zst", (("p", result(f"k{n}", gaps=2000)) for n in range(300)))
    assert [row["key"] for row in read_results(tmp_path / "r.zst")] == [f"k{n}" for n in range(300)]


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "r.zst"
    write_results(path, [("p", result("old"))])

    def failing() -> Iterator[tuple[str, RequestResult]]:
        yield "p", result("new")
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        write_results(path, failing())
    assert [row["key"] for row in read_results(path)] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "r.zst"
    write_results(path, (("p", result(f"k{n}")) for n in range(100)))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(UnusableInput, match="ends in the middle"):
        list(read_results(path))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.zst"
    write_results(path, (("p", result(f"k{n}")) for n in range(100)))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(UnusableInput):
        list(read_results(path))


@pytest.mark.parametrize("content", [b"not json\n", b"[1]\n", b'{"key": "a"}\n\xff\n', b'{"key": "a"}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.zst"
    path.write_bytes(zstandard.compress(content))
    with pytest.raises(UnusableInput):
        list(read_results(path))
    path.write_bytes(content)
    with pytest.raises(UnusableInput):
        list(read_results(path))
