#!/usr/bin/env python3
"""Read which options `vllm serve` has in each release: `read_options.py FOLDER [FOLDER ...] > serve_options.yml`.

A FOLDER is named after its release (0.26.0) and holds what the wheel has as vllm/: its engine/arg_utils.py, the
cli_args.py beside the entry points and entrypoints/cli/serve.py. Nothing of vLLM is imported: what its parser is given
stands in these files as text. Prints analysis/kvtrial/record/data/serve_options.yml; tests hold it against the options
that an installed engine prints.
"""

import ast
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

ENGINE = "vllm/engine/arg_utils.py"
FRONTEND = tuple(f"vllm/entrypoints/{room}/cli_args.py" for room in ("openai", "launchers", "common"))
SERVE = "vllm/entrypoints/cli/serve.py"
ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
FRONTEND_CLASSES = ("BaseFrontendArgs", "FrontendArgs")


def options_of(release: Path) -> set[str]:
    """Long names of the options of one release, without the dashes in front, and its short ones with theirs."""
    engine = ast.parse((release / ENGINE).read_text(encoding="utf-8"))
    frontend = ast.parse(next(release / name for name in FRONTEND if (release / name).exists()).read_text("utf-8"))
    serve = ast.parse((release / SERVE).read_text(encoding="utf-8"))
    found: set[str] = set()
    for tree, classes in ((engine, ENGINE_CLASSES), (frontend, FRONTEND_CLASSES)):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found |= set(added(node))
    found |= {name for node in frontend.body if isinstance(node, ast.FunctionDef) for name in added(node)}
    found |= set(added(serve))
    found |= {name for node in frontend.body if isinstance(node, ast.ClassDef) for name in fields(node)}
    return {name.removeprefix("--") for name in found}


def added(node: ast.AST) -> Iterator[str]:
    """Names that `add_argument` is given, and those under "flags", from which the front end's parser takes more."""
    for names, _ in calls(node):
        yield from names
    for call in ast.walk(node):
        if isinstance(call, ast.Assign) and any("flags" in texts(target) for target in call.targets):
            yield from (text for text in texts(call.value) if is_option(text))


def calls(node: ast.AST) -> Iterator[tuple[list[str], ast.Call]]:
    """Each `add_argument` with the names it is given; one in a loop over a list that stands there, for each of it."""
    looped: dict[ast.AST, dict[str, list[str]]] = {}
    for loop in ast.walk(node):
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.List | ast.Tuple):
            first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
            if isinstance(first, ast.Name):
                firsts = [row.elts[0] if isinstance(row, ast.Tuple) else row for row in loop.iter.elts]
                there = {first.id: [text for row in firsts for text in texts(row)]}
                looped |= dict.fromkeys(ast.walk(loop), there)
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for arg in call.args:
                if isinstance(arg, ast.Name):
                    yield from (([text], call) for text in looped.get(call, {}).get(arg.id, []) if is_option(text))
            if names := [text for arg in call.args for text in texts(arg) if is_option(text)]:
                yield names, call


def is_option(text: str) -> bool:
    """Whether a piece of text is an option with its dashes."""
    return text.startswith("-") and text.strip("-") != ""


def texts(node: ast.AST) -> list[str]:
    """String constants in a piece of source."""
    return [at.value for at in ast.walk(node) if isinstance(at, ast.Constant) and isinstance(at.value, str)]


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Fields of the front end's arguments: each is an option of that name."""
    if node.name in FRONTEND_CLASSES:
        for at in node.body:
            if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name):
                yield f"--{at.target.id.replace('_', '-')}"


def numbers(release: str) -> tuple[int, ...]:
    """A release as numbers to sort by."""
    return tuple(int(part) for part in release.split("."))


def lines(found: dict[str, set[str]]) -> Iterator[str]:
    """The data file: releases that were read, then each option with the releases in which it begins and ends."""
    releases = sorted(found, key=numbers)
    minors = [".".join(release.split(".")[:2]) for release in releases]
    today = datetime.date.today()
    yield "# Options of `vllm serve`, without the dashes in front (short ones with theirs), read from the wheels of"
    yield f"# these releases by requirements/read_options.py on {today}. since inclusive, until exclusive: the first"
    yield "# release read that has it, or no longer has it. Without either: in all that were read."
    yield "releases: [" + ", ".join(f'"{release}"' for release in releases) + "]"
    yield "options:"
    for option in sorted(set().union(*found.values())):
        there = [option in found[release] for release in releases]
        spans = []
        for at, has in enumerate(there):
            if has and (at == 0 or not there[at - 1]):
                spans.append([at, len(there)])
            elif not has and at and there[at - 1]:
                spans[-1][1] = at
        said = []
        for begin, end in spans:
            bounds = [f'since: "{minors[begin]}"'] if begin else []
            bounds += [f'until: "{minors[end]}"'] if end < len(there) else []
            said.append("{" + ", ".join(bounds) + "}")
        yield f"  {option}: [{', '.join(said)}]"


def main() -> None:
    """Read the folders and print the data file."""
    found = {Path(folder).name: options_of(Path(folder)) for folder in sys.argv[1:]}
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
