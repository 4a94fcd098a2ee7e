"""What requests ask for against what they get: a large reserve with short answers is another load than full answers."""

from collections.abc import Iterator

from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window
from kvtrial.analysis.observe.words import percent, whole

SHORT_SHARE = 0.5


def output_lengths(window: Window) -> Iterator[Finding]:
    """Requested and real output lengths, where answers end far below what was asked for."""
    asked, given = window.mean("params_max_tokens"), window.mean("request_generation_tokens")
    if not asked or given is None or given >= SHORT_SHARE * asked:
        return
    prompt = window.mean("request_prompt_tokens")
    beside = f" after {whole(prompt)} of prompt" if prompt else ""
    yield Finding(
        "output_shorter_than_requested",
        "info",
        f"Requests ask for {whole(asked)} output tokens in the mean and end after {whole(given)} "
        f"({percent(given / asked)}){beside}, over {whole(window.rise('request_generation_tokens_count') or 0)} "
        f"requests "
        f"{window.during}. vLLM sets nothing aside for the rest, so it costs no memory; who sizes concurrency by "
        "max_tokens admits fewer than fit, and who sizes it by these answers is surprised by the day they get long.",
        {"requested_mean_tokens": asked, "real_mean_tokens": given, "prompt_mean_tokens": prompt},
        "Size by the real lengths and their spread. Lower max_tokens where no answer needs it.",
        about=window.about,
    )
