"""`dlrover init`: add the strategy and the callback to the Trainers of a script, as a diff or in place.

The syntax tree shows what each Trainer lacks, and the text is edited at its tokens' positions: formatting and comments stay.
Nothing is changed if one Trainer of the script cannot be decided on: the command then prints what to pass where. The script is
never run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.run_options import checked_script
from lightning_dlrover.files import atomic_write
from lightning_dlrover.output import complain, show

LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning")
"""Packages whose Trainer takes the strategy."""

STRATEGY, CALLBACK = "DLRoverStrategy", "DLRoverCallback"

REPLACED_STRATEGIES = {"auto": "", "ddp": "", "ddp_find_unused_parameters_true": "find_unused_parameters=True"}
"""Strategies by name that `DLRoverStrategy` takes the place of, and its arguments then."""


@dataclass(frozen=True)
class Edit:
    """A replacement of the characters from `start` to `end`, counted in the script's text."""

    start: int
    end: int
    text: str


@dataclass
class Findings:
    """The edits that make a script elastic, and the places where nobody but its author can decide."""

    edits: list[Edit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_trainers: int = 0


def init_command(options: argparse.Namespace) -> int:
    """Show the lines that make a script elastic, or write them into it."""
    script = checked_script(options.script)
    with script.open("rb") as stream:
        encoding = tokenize.detect_encoding(stream.readline)[0]
    text = script.read_bytes().decode(encoding)
    new = converted(text, options.script, script.parent)
    if new == text:
        show(f"{options.script}: nothing to do, each Trainer has a {STRATEGY} and a {CALLBACK}")
        return EXIT_OK
    if options.write:
        mode = script.stat().st_mode
        atomic_write(script, new.encode(encoding))
        script.chmod(mode)
        show(f"{options.script}: written; `dlrover doctor {options.script}` checks it up to its first batch")
        return EXIT_OK
    lines = text.splitlines(keepends=True), new.splitlines(keepends=True)
    name = options.script.lstrip("/")
    for line in difflib.unified_diff(*lines, fromfile=f"a/{name}", tofile=f"b/{name}"):
        show(line.rstrip("\r\n") + ("" if line.endswith("\n") else "\n\\ No newline at end of file"))
    complain(f"nothing was changed; `dlrover init --write {options.script}` does it", prefix="")
    return EXIT_OK


def converted(text: str, name: str, folder: Path) -> str:
    """Return the text of a script whose Trainers have the strategy and the callback; unchanged if they all do.

    Args:
        name: the script, for messages.
        folder: the script's, in which modules that it imports are looked for.

    Raises:
        UsageError: a Trainer cannot be decided on, or there is none.
    """
    script = _Script(text)
    found = script.findings()
    if found.problems:
        lines = "\n  ".join(found.problems)
        raise UsageError(f"{name} was left as it is, because only you can decide on this:\n  {lines}")
    if not found.num_trainers:
        raise UsageError(f"{name} was left as it is: {_without_trainer(script.tree, folder)}")
    new = _applied(text, found.edits)
    try:
        left = _Script(new).findings()
        is_done = not left.edits and not left.problems
    except (SyntaxError, tokenize.TokenError):
        is_done = False
    if not is_done:
        raise UsageError(
            f"{name} was left as it is, because its text could not be edited safely: add strategy={STRATEGY}() and "
            f"callbacks=[{CALLBACK}()] to its Trainer yourself"
        )
    return new


def _applied(text: str, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _without_trainer(tree: ast.Module, folder: Path) -> str:
    """Explain a script that makes no Trainer."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(_last_name(call.func) == "LightningCLI" for call in calls):
        return (
            "LightningCLI makes its Trainer. Import lightning_dlrover in the script, and set in its configuration:\n"
            "  trainer:\n"
            "    strategy: dlrover\n"
            "    callbacks:\n"
            f"    - class_path: lightning_dlrover.{CALLBACK}"
        )
    pass_it = f"pass strategy={STRATEGY}() and callbacks=[{CALLBACK}()] there"
    for module in _imported_modules(tree):
        file = folder.joinpath(*module.split("."))
        for each in (file.with_suffix(".py"), file / "__init__.py"):
            try:
                makes_one = _Script(each.read_text(encoding="utf-8")).trainers()
            except (OSError, SyntaxError, ValueError, tokenize.TokenError):
                continue
            if makes_one:
                return f"its Trainer is made in {os.path.relpath(each)}; run `dlrover init` on that file, or {pass_it}"
    if "Fabric" in {_last_name(call.func) for call in calls}:
        return "it uses Fabric; a loop of its own becomes elastic by World.steps (docs/guide/plain_pytorch.md)"
    return (
        f"it makes no Lightning Trainer. Where another module or library makes it, {pass_it}; a loop without Lightning becomes "
        "elastic by World.steps (docs/guide/plain_pytorch.md)"
    )


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module
            yield from (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Script:
    """The syntax tree and the tokens of a script, with positions as indices into its text.

    Raises:
        SyntaxError: the text is not valid Python.
        tokenize.TokenError: likewise.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.tree = ast.parse(text)
        lines = io.StringIO(text, newline="").readlines()  # ends at \n and \r\n, as for the parser
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        readline = iter(lines).__next__
        self._tokens = [token for token in tokenize.generate_tokens(readline) if token.string]
        self._names = _names_of_imports(self.tree)
        self._scopes = _scopes(self.tree)

    def trainers(self) -> list[ast.Call]:
        """Return the calls that make a Lightning Trainer."""
        names = {f"{package}.Trainer" for package in LIGHTNING}
        names |= {f"{package}.trainer.Trainer" for package in LIGHTNING}
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._full_name(node.func) in names]
        return sorted(calls, key=lambda call: (call.lineno, call.col_offset))

    def findings(self) -> Findings:
        found = Findings()
        used: set[str] = set()
        for call in self.trainers():
            found.num_trainers += 1
            used |= self._look_at(call, found)
        if found.edits and not found.problems:
            self._import(used, found)
        return found

    def _look_at(self, call: ast.Call, found: Findings) -> set[str]:
        """Add the edits and problems of a Trainer. Return the names that its edits use."""
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        where = f"line {call.lineno}"
        if any(isinstance(argument, ast.Starred) for argument in call.args) or (
            None in keywords and not {"strategy", "callbacks"} <= keywords.keys()
        ):
            missing = [text for text in self._missing(keywords) if text]
            place = "*args" if None not in keywords else f"**{ast.unparse(keywords[None])}"
            found.problems.append(
                f"{where}: {place} may hold arguments of the Trainer; see that it gets {' and '.join(missing)}"
            )
            return set()
        used: set[str] = set()
        new: list[str] = []
        if "strategy" not in keywords:
            new.append(f"strategy={STRATEGY}()")
            used.add(STRATEGY)
        elif not self._is_elastic(keywords["strategy"]):
            if text := self._strategy_for(keywords["strategy"]):
                found.edits.append(self._replace(keywords["strategy"], text))
                used.add(STRATEGY)
            else:
                found.problems.append(self._strategy_problem(where, keywords["strategy"]))
        if "callbacks" not in keywords:
            new.append(f"callbacks=[{CALLBACK}()]")
            used.add(CALLBACK)
        else:
            edits = self._callback_edits(call, keywords["callbacks"])
            if edits is None:
                text = ast.unparse(keywords["callbacks"])
                found.problems.append(f"{where}: callbacks={text} may be a list or not; add {CALLBACK}() to it")
            elif edits:
                found.edits += edits
                used.add(CALLBACK)
        if new:
            found.edits += self._append(self._index(call.end_lineno, call.end_col_offset) - 1, new)
        return used

    @staticmethod
    def _missing(keywords: dict[str | None, ast.expr]) -> Iterator[str]:
        yield "" if "strategy" in keywords else f"strategy={STRATEGY}()"
        yield f"{CALLBACK}() in its list of callbacks" if "callbacks" in keywords else f"callbacks=[{CALLBACK}()]"

    # --- strategy ---

    def _is_elastic(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name) and len(assigned := self._assignments(value)) == 1:
            return self._is_elastic(assigned[0])
        is_named = isinstance(value, ast.Constant) and value.value == "dlrover"
        return is_named or (isinstance(value, ast.Call) and self._is_ours(value.func, STRATEGY))

    def _strategy_for(self, value: ast.expr) -> str:
        """Return the expression in place of a strategy; empty: nobody but the author can decide."""
        if isinstance(value, ast.Constant) and value.value in REPLACED_STRATEGIES:
            return f"{STRATEGY}({REPLACED_STRATEGIES[value.value]})"
        is_ddp = isinstance(value, ast.Call) and self._full_name(value.func).rpartition(".")[2] == "DDPStrategy"
        return f"{STRATEGY}()" if is_ddp and not value.args and not value.keywords else ""  # type: ignore[attr-defined]

    def _strategy_problem(self, where: str, value: ast.expr) -> str:
        text = ast.unparse(value)
        if isinstance(value, ast.Call) and self._full_name(value.func).rpartition(".")[2] == "DDPStrategy":
            return f"{where}: strategy={text}; pass the arguments that you need to {STRATEGY}(...), which takes those of DDP"
        if isinstance(value, ast.Constant):
            return f"{where}: strategy={text} distributes the model in another way; use strategy={STRATEGY}() if DDP fits it"
        return f"{where}: strategy={text} is decided elsewhere; let it be {STRATEGY}(), or 'dlrover'"

    # --- callbacks ---

    def _callback_edits(self, call: ast.Call, value: ast.expr) -> list[Edit] | None:
        """Return the edits that add the callback, none if it is there; None: nobody but the author can decide."""
        within = self._scope_of(call) if isinstance(value, ast.Name) else value
        if any(isinstance(node, ast.Call) and self._is_ours(node.func, CALLBACK) for node in ast.walk(within)):
            return []
        if isinstance(value, ast.List):
            return self._append(self._index(value.end_lineno, value.end_col_offset) - 1, [f"{CALLBACK}()"])
        if isinstance(value, ast.Constant) and value.value is None:
            return [self._replace(value, f"[{CALLBACK}()]")]
        if self._is_list(value):
            text = ast.get_source_segment(self._text, value) or ""
            spread = f"*{text}" if isinstance(value, ast.Name | ast.ListComp | ast.Call) else f"*({text})"
            return [self._replace(value, f"[{spread}, {CALLBACK}()]")]
        if isinstance(value, ast.Call) and _last_name(value.func)[:1].isupper():  # one callback
            return [self._replace(value, f"[{ast.get_source_segment(self._text, value)}, {CALLBACK}()]")]
        return None

    def _is_list(self, value: ast.expr) -> bool:
        match value:
            case ast.List() | ast.ListComp() | ast.Call(func=ast.Name(id="list")):
                return True
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._is_list(left) or self._is_list(right)
            case ast.Name():
                assigned = self._assignments(value)
                return bool(assigned) and all(not isinstance(each, ast.Name) and self._is_list(each) for each in assigned)
        return False

    # --- names ---

    def _full_name(self, node: ast.expr) -> str:
        """Return the name of an imported object with its package, such as `lightning.Trainer`; empty: it is none."""
        if isinstance(node, ast.Attribute):
            return f"{owner}.{node.attr}" if (owner := self._full_name(node.value)) else ""
        return self._names.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _is_ours(self, node: ast.expr, name: str) -> bool:
        return self._full_name(node) in (f"lightning_dlrover.{name}", f"lightning_dlrover.*.{name}")

    def _scope_of(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        return self._scopes.get(node, self.tree)

    def _assignments(self, name: ast.Name) -> list[ast.expr]:
        """Return what a name is bound to in its function, or else in the module; none if it is a parameter, or unclear."""
        for scope in dict.fromkeys([self._scope_of(name), self.tree]):
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
                if any(each.arg == name.id for each in given):
                    return []
            nodes = [node for node in ast.walk(scope) if scope is not self.tree or self._scope_of(node) is self.tree]
            bound = [
                node for node in nodes if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Store)
            ]
            plain: list[ast.expr] = []
            for node in nodes:
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name.id for t in node.targets):
                    plain.append(node.value)
                elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                    target, value = node.target, node.value
                    if isinstance(target, ast.Name) and target.id == name.id and value is not None:
                        plain.append(value)
            if bound:
                return plain if len(plain) == len(bound) else []
        return []

    # --- edits ---

    def _index(self, line: int | None, column: int | None) -> int:
        """Return the index of a position of the syntax tree, whose columns count bytes of UTF-8."""
        assert line is not None and column is not None  # noqa: PT018
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _at(self, position: tuple[int, int]) -> int:
        """Return the index of a position of a token."""
        return self._starts[position[0] - 1] + position[1]

    def _replace(self, node: ast.expr, text: str) -> Edit:
        return Edit(self._index(node.lineno, node.col_offset), self._index(node.end_lineno, node.end_col_offset), text)

    def _append(self, closing: int, items: Sequence[str]) -> list[Edit]:
        """Return the edits that append items to the arguments or the list that ends with the bracket at `closing`."""
        number = next(n for n, token in enumerate(self._tokens) if self._at(token.start) == closing)
        depth, opening = 1, number
        while depth:
            opening -= 1
            depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(self._tokens[opening].string, 0)
        inner = [t for t in self._tokens[opening + 1 : number] if t.type not in (tokenize.NL, tokenize.COMMENT)]
        if not inner:
            end = self._at(self._tokens[opening].end)
            return [Edit(end, end, ", ".join(items))]
        first, last = inner[0], inner[-1]
        end = self._at(last.end)
        if last.end[0] == self._tokens[number].start[0]:  # the closing bracket is on the line of the last item
            return [Edit(end, end, (" " if last.string == "," else ", ") + ", ".join(items))]
        edits = [] if last.string == "," else [Edit(end, end, ",")]
        line = self._lines[last.end[0] - 1]
        before = self._lines[first.start[0] - 1][: first.start[1]]
        indent = before if not before.strip() else " " * len(before)
        ending = line[len(line.rstrip("\r\n")) :]
        at = self._starts[last.end[0]]  # the beginning of the next line, behind any comment
        return [*edits, Edit(at, at, "".join(f"{indent}{item},{ending}" for item in items))]

    def _import(self, names: set[str], found: Findings) -> None:
        """Add the import of those names that the script does not have."""
        missing = sorted(name for name in names if self._names.get(name) != f"lightning_dlrover.{name}")
        if not missing:
            return
        for anchor in self._import_anchors():
            line = self._lines[(anchor.end_lineno or anchor.lineno) - 1]
            ending = line[len(line.rstrip("\r\n")) :]
            at = self._starts[anchor.end_lineno or anchor.lineno]
            indent = self._lines[anchor.lineno - 1][: anchor.col_offset]
            indent = indent if not indent.strip() else ""
            text = f"{indent}from lightning_dlrover import {', '.join(missing)}{ending or os.linesep}"
            found.edits.append(Edit(at, at, text if ending else os.linesep + text))

    def _import_anchors(self) -> list[ast.stmt]:
        """Return the statements after which the import belongs: the script's imports, or those of Lightning in functions.

        The strategy belongs to the package of Lightning that was imported before.
        """
        of_lightning = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and _binds_lightning(node)]
        outside = [node for node in of_lightning if self._scope_of(node) is self.tree]
        if not outside:
            return of_lightning
        last = None
        for statement in self.tree.body:
            has_lightning = any(node in outside for node in ast.walk(statement))
            if has_lightning or isinstance(statement, ast.Import | ast.ImportFrom):
                last = statement
            elif last is not None and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                break
        return [last] if last is not None and (last.end_lineno or 0) >= outside[0].lineno else outside[:1]


def _binds_lightning(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in LIGHTNING for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in LIGHTNING


def _names_of_imports(tree: ast.Module) -> dict[str, str]:
    """Return the imported objects by their names in the script."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if alias.name == "*" and node.module in LIGHTNING:
                    names["Trainer"] = f"{node.module}.Trainer"
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _scopes(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """Return the function around each node that is in one."""
    scopes: dict[ast.AST, ast.AST] = {}

    def enter(node: ast.AST, scope: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            scopes[child] = scope
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            enter(child, child if is_function else scope)

    enter(tree, tree)
    return scopes
