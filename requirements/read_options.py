#!/usr/bin/env python3
"""Read which options `vllm serve` has in each release: `read_options.py FOLDER [FOLDER ...] > serve_options.yml`.

A FOLDER is named after its release (0.26.0) and holds what the wheel has as vllm/: its engine/arg_utils.py, the
cli_args.py beside the entry points, entrypoints/cli/serve.py and config/. Nothing of vLLM is imported: what its parser
is given stands in these files as text. Prints analysis/kvtrial/record/data/serve_options.yml; tests hold it against the
options that an installed engine prints.
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
KINDS = ("on_off", "switch", "int", "float", "value")
PLAIN = {"int", "float", "str", "list", "tuple", "set", "dict", "Any", "Literal", "SkipValidation"}
UNTOUCHED = {"default", "help", "choices", "metavar", "deprecated"}
"""Keys of an argument whose change leaves open neither how many values it takes nor whether it is a flag."""


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


def aliases_of(release: Path) -> dict[str, str]:
    """Other names of an option in one release, as `options_of` has them -> its first long name."""
    found: dict[str, str] = {}
    for tree in trees(release):
        for names, _ in calls(tree):
            long = [name for name in names if name.startswith("--")]
            found |= {name.removeprefix("--"): long[0][2:] for name in names if long and name != long[0]}
    return found


def kinds_of(release: Path) -> dict[str, str]:
    """What each option of one release takes, by KINDS, or "" where its text does not show that; by its long names."""
    engine, *_ = read = trees(release)
    config = [ast.parse(path.read_text("utf-8")) for path in sorted((release / "vllm" / "config").rglob("*.py"))]
    nodes = [node for tree in [*config, *read] for node in ast.walk(tree)]
    of_field = {node.name: annotations(node) for node in nodes if isinstance(node, ast.ClassDef)}
    sources = {
        target.id: node.value.args[0].id
        for node in ast.walk(engine)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func) == "get_kwargs"
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.args[0], ast.Name)
    }
    sized = {
        text
        for node in engine.body
        if isinstance(node, ast.FunctionDef) and "kwargs" in node.name
        for text in texts(node)
    }
    changed = {text for tree in read for node in ast.walk(tree) for text in touched(node)}

    def by_field(name: str, annotation: ast.expr | None) -> str | None:
        kind = None if annotation is None or name in changed else kind_of(annotation)
        return "value" if kind == "int" and name in sized else kind

    found: dict[str, str | None] = {}
    for tree in read:
        for names, call in calls(tree):
            kind = kind_by_call(call)
            for at in ast.walk(call):
                if kind == "field" and isinstance(at, ast.Subscript) and ast.unparse(at.value) in sources:
                    field = texts(at.slice)[0]
                    kind = by_field(field, of_field.get(sources[ast.unparse(at.value)], {}).get(field))
            found |= {name[2:]: None if kind == "field" else kind for name in names if name.startswith("--")}
    for name in FRONTEND_CLASSES:
        for field, annotation in of_field.get(name, {}).items():
            found[field.replace("_", "-")] = by_field(field, annotation)
    return {name: kind or "" for name, kind in found.items()}


def trees(release: Path) -> list[ast.Module]:
    """The files of one release that give its parser options."""
    frontend = next(release / name for name in FRONTEND if (release / name).exists())
    return [ast.parse(path.read_text("utf-8")) for path in (release / ENGINE, frontend, release / SERVE)]


def annotations(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Fields of a class with their types."""
    return {
        at.target.id: at.annotation
        for at in node.body
        if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name)
    }


def touched(node: ast.AST) -> list[str]:
    """Fields whose argument is changed by hand in what it takes, such as kwargs["field"]["type"] = json.loads."""
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    return [
        text
        for target in targets
        if isinstance(target, ast.Subscript) and not set(texts(target.slice)) <= UNTOUCHED
        for text in texts(target.value)
    ]


def kind_by_call(call: ast.Call) -> str | None:
    """What an option takes by the words of its `add_argument`; "field" where its field has to be looked at."""
    words = {word.arg: word.value for word in call.keywords}
    if None in words:
        dicts = [at for at in ast.walk(call) if isinstance(at, ast.Dict)]
        keys = {text for at in dicts for key in at.keys if key for text in texts(key)}
        return "field" if keys | {word for word in words if word} <= UNTOUCHED else None
    action = ast.unparse(words["action"]) if "action" in words else "'store'"
    if action == "'store_true'":
        return "switch"
    if action.rsplit(".", 1)[-1] == "BooleanOptionalAction":
        return "on_off"
    if action != "'store'" or "nargs" in words:
        return None
    kind = ast.unparse(words["type"]) if "type" in words else "str"
    return kind if kind in ("int", "float") else "value"


def kind_of(annotation: ast.expr) -> str | None:
    """What an option takes by the type of its field."""
    names = {at.id for at in ast.walk(annotation) if isinstance(at, ast.Name)}
    parts = {part.strip() for part in ast.unparse(annotation).split("|")} - {"None"}
    if parts == {"bool"}:
        return "on_off"
    if not names <= PLAIN:
        return None
    return parts.pop() if parts in ({"int"}, {"float"}) else "value"


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


def agreed(found: list[dict[str, str]]) -> dict[str, str]:
    """What all releases that have a name say of it alike."""
    said: dict[str, set[str]] = {}
    for names in found:
        for name, what in names.items():
            said.setdefault(name, set()).add(what)
    return {name: whats.pop() for name, whats in sorted(said.items()) if len(whats) == 1 and whats != {""}}


def lines(found: dict[str, set[str]], aliases: dict[str, str], kinds: dict[str, str]) -> Iterator[str]:
    """The data file: releases that were read, then each option with the releases in which it begins and ends."""
    releases = sorted(found, key=numbers)
    minors = [".".join(release.split(".")[:2]) for release in releases]
    today = datetime.date.today()
    yield "# Options of `vllm serve`, without the dashes in front (short ones with theirs), read from the wheels of"
    yield f"# these releases by requirements/read_options.py on {today}. since inclusive, until exclusive: the first"
    yield "# release read that has it, or no longer has it. Without either: in all that were read."
    yield "releases: [" + ", ".join(f'"{release}"' for release in releases) + "]"
    yield "options:"
    options = sorted(set().union(*found.values()))
    for option in options:
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
    yield "# Other names of an option -> its first long name, the same in all releases that have both."
    yield "aliases:"
    yield from (f"  {name}: {whole}" for name, whole in aliases.items() if name in options)
    yield "# What an option takes, the same in all releases that have it: on_off is a flag with a --no- form, switch"
    yield "# one without; int, float and value take something, and have no --no- form. Others are not known."
    yield "takes:"
    for kind in KINDS:
        yield f"  {kind}:"
        yield from (f"    - {name}" for name, what in kinds.items() if what == kind and name in options)


def main() -> None:
    """Read the folders and print the data file."""
    folders = [Path(folder) for folder in sys.argv[1:]]
    found = {folder.name: options_of(folder) for folder in folders}
    aliases, kinds = agreed([aliases_of(one) for one in folders]), agreed([kinds_of(one) for one in folders])
    print("\n".join(lines(found, aliases, kinds)))


if __name__ == "__main__":
    main()
