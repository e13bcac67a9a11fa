"""Splits a shell script into the words of its commands, without running it. No torch.

Quotes, comments, continued lines, variables and arrays that the script assigns, sums of whole numbers, and branches on
variables of known value are followed. Words that depend on the environment, another command or another branch are
`Computed`.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from preheat.errors import RecipeError
from preheat.interop.keys import Computed
from preheat.recipe.yaml_io import LARGEST_FILE

__all__ = ["Command", "Word", "list_commands"]


class Word(NamedTuple):
    """A word of a command after expansion: `Computed` source if it is not known without running the script."""

    text: str
    line: int

    @property
    def is_computed(self) -> bool:
        """Returns True if the script computes it."""
        return isinstance(self.text, Computed)


@dataclass(frozen=True)
class Command:
    """A command of the script.

    Attributes:
        words: its name and arguments.
        environment: variables that it sees, as far as the script sets them.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]

    @property
    def line(self) -> int:
        """Line of its name."""
        return self.words[0].line


class _Part(NamedTuple):
    """A part of a word as it is written: text, or the source of an expansion."""

    text: str
    line: int
    quoted: bool = False
    expands: bool = False


class _Piece(NamedTuple):
    """A part of a word after expansion.

    Attributes:
        splits: blanks in it separate words.
        computed: its text is the source of what is not known.
    """

    text: str
    line: int
    splits: bool = False
    computed: bool = False


@dataclass
class _Token:
    """A word as it is written, an array's assignment (`NAME=(...)`), or one of the operators ( and ).

    Attributes:
        follows: of the first word of a statement, the operator before it.
        redirected: of the first word of a statement, whether files of redirections were left out.
    """

    parts: list[_Part] = field(default_factory=list)
    items: list[_Token] | None = None
    operator: str = ""
    follows: str = ""
    redirected: bool = False

    @property
    def line(self) -> int:
        return self.parts[0].line

    @property
    def plain(self) -> str:
        """The text if none of it is quoted or expanded, else empty."""
        return "" if any(part.quoted or part.expands for part in self.parts) else "".join(p.text for p in self.parts)


_REDIRECTION = re.compile(r"&>>|&>|>>|>&|>\||>|<<<|<<-|<<|<&|<")
_SEPARATOR = re.compile(r"\|\||&&|;;|[;|&\n]")
_TEXT = re.compile(r"[^\s\\'\"$`;|&<>()#]+|#")
_HEREDOC = re.compile(r"[ \t]*(['\"]?)([^\s'\";|&<>]+)\1")
_NAME = re.compile(r"\$(?:\w+|[@*#?$!-])")
_CLOSING = {"(": ")", "{": "}"}


class _Scanner:
    """Splits text into statements of tokens."""

    def __init__(self, text: str, where: str, first_line: int = 1) -> None:
        self.text, self.where, self.first_line = text, where, first_line
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.at = 0
        self.redirected = False  # in the present statement

    def line(self, at: int) -> int:
        return self.first_line + bisect_left(self.newlines, at)

    def error(self, at: int, text: str) -> RecipeError:
        return RecipeError(f"{self.where}:{self.line(at)}: not a shell script that can be read: {text}")

    def statements(self) -> Iterator[list[_Token]]:
        """Yields the statements in the order of the file; an operator is a statement of its own."""
        statement: list[_Token] = []
        follows = ""
        for token in self._tokens(within_array=False):
            if not token.operator:
                statement.append(token)
                continue
            if statement:
                yield self._finish_statement(statement, follows)
            statement, follows, self.redirected = [], token.operator, False
            if token.operator in "()":
                yield [token]
        if statement:
            yield self._finish_statement(statement, follows)

    def _finish_statement(self, tokens: list[_Token], follows: str) -> list[_Token]:
        tokens[0].follows, tokens[0].redirected = follows, self.redirected
        return tokens

    def _tokens(self, *, within_array: bool) -> Iterator[_Token]:
        parts: list[_Part] = []
        heredocs: list[tuple[str, bool]] = []
        drops_next = False  # the file of a redirection
        text = self.text
        start = self.at
        while self.at < len(text):
            at, char = self.at, text[self.at]
            ends = char in " \t\r\n" or char in ";|&<>()"
            redirection = _REDIRECTION.match(text, at)
            if redirection and "".join(part.text for part in parts).isdigit():
                parts = []  # the number of a stream, as in 2>&1
            if char == "(" and parts and parts[-1].text.endswith("=") and not parts[-1].quoted:
                self.at += 1
                yield _Token(parts, list(self._tokens(within_array=True)))
                parts = []
                continue
            if ends and parts:
                if not drops_next:
                    yield _Token(parts)
                parts, drops_next = [], False
            if text.startswith(("\\\n", "\\\r\n"), at):
                self.at = text.index("\n", at) + 1
            elif redirection:
                self.at = redirection.end()
                drops_next = self.redirected = True
                if redirection[0] in ("<<", "<<-") and (word := _HEREDOC.match(text, self.at)):
                    heredocs.append((word[2], redirection[0] == "<<-"))
                    self.at, drops_next = word.end(), False
                elif text.startswith("(", self.at):  # the output of a command in place of a file
                    self.at, drops_next = self._find_end(self.at), False
            elif char == ")" and within_array:
                self.at += 1
                return
            elif char in "()":
                self.at += 1
                yield _Token(operator=char)
            elif char == "\n" and within_array:
                self.at += 1
            elif separator := _SEPARATOR.match(text, at):
                self.at = separator.end()
                drops_next = False
                yield _Token(operator=separator[0])
                while char == "\n" and heredocs:
                    self._skip_heredoc(*heredocs.pop(0))
            elif ends:
                self.at += 1
            elif char == "#" and not parts:
                self.at = end if (end := text.find("\n", at)) >= 0 else len(text)
            else:
                parts += self._read_parts()
        if within_array:
            raise self.error(start, "a parenthesis is not closed")
        if parts and not drops_next:
            yield _Token(parts)

    def _skip_heredoc(self, end: str, tabs: bool) -> None:
        while self.at < len(self.text):
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop
            line = self.text[self.at : stop]
            self.at = stop + 1
            if (line.lstrip("\t") if tabs else line).rstrip("\r") == end:
                return

    def _read_parts(self) -> list[_Part]:
        """Reads what begins here: a quoted text, an expansion, or plain text."""
        at, char = self.at, self.text[self.at]
        if char == "$" and self.text[at + 1 : at + 2] in ("'", '"'):
            self.at, at, char = at + 1, at + 1, self.text[at + 1]
        if char == "'":
            if (end := self.text.find("'", at + 1)) < 0:
                raise self.error(at, "a quote is not closed")
            self.at = end + 1
            return [_Part(self.text[at + 1 : end], self.line(at), quoted=True)]
        if char == '"':
            return self._read_double_quotes()
        if char == "\\":
            self.at += 2
            return [_Part(self.text[at + 1 : at + 2], self.line(at), quoted=True)]
        if char in "$`":
            return [self._read_expansion(quoted=False)]
        match = _TEXT.match(self.text, at)
        assert match is not None
        self.at = match.end()
        return [_Part(match[0], self.line(at))]

    def _read_double_quotes(self) -> list[_Part]:
        """Reads text in double quotes: a part for each of its lines, so that words of it have their own."""
        first = self.at
        self.at += 1
        parts = [_Part("", self.line(first), quoted=True)]
        while self.at < len(self.text):
            at, char = self.at, self.text[self.at]
            if char == '"':
                self.at += 1
                return parts
            if char in "$`":
                parts.append(self._read_expansion(quoted=True))
            elif char == "\\" and self.text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                self.at += 2
                parts.append(_Part(self.text[at + 1].strip("\n"), self.line(self.at - 1), quoted=True))
            else:
                end = next((i for i in range(at + 1, len(self.text)) if self.text[i] in '"$`\\\n'), len(self.text))
                self.at = end
                parts.append(_Part(self.text[at:end], self.line(at), quoted=True))
        raise self.error(first, "a quote is not closed")

    def _read_expansion(self, *, quoted: bool) -> _Part:
        at = self.at
        if self.text[at] == "`":
            if (end := self.text.find("`", at + 1)) < 0:
                raise self.error(at, "a backquote is not closed")
            self.at = end + 1
        elif self.text[at + 1 : at + 2] in _CLOSING:
            self.at = self._find_end(at + 1)
        elif name := _NAME.match(self.text, at):
            self.at = name.end() if not self.text[at + 1].isdigit() else at + 2
        else:
            self.at += 1
            return _Part("$", self.line(at), quoted)
        return _Part(self.text[at : self.at], self.line(at), quoted, expands=True)

    def _find_end(self, at: int) -> int:
        """Returns the place behind the bracket that closes the one here."""
        opening, quote, depth = self.text[at], "", 0
        for i in range(at, len(self.text)):
            char = self.text[i]
            if quote or char in "'\"":
                quote = "" if char == quote else quote or char
            elif char in (opening, _CLOSING[opening]):
                depth += 1 if char == opening else -1
                if not depth:
                    return i + 1
        raise self.error(at, f"{opening} is not closed")


_BREAK = _Piece(" ", 0, splits=True)
_VARIABLE = re.compile(r"\$\{?(\w+)(\[[@*]\])?\}?")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=](.*)\}", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPENING, _CLOSED = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
_REPEATED = ("for", "while", "until", "select", "{")
_KEYWORDS = ("then", "do", "else", "elif", "time", "!", "exec", "nohup", "sudo", "env", "command", "function")
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_TESTS = {"[[": "]]", "[": "]", "test": ""}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass
class _Block:
    """A bracket or compound command around a statement.

    Attributes:
        opening: the word that opens it.
        runs: whether the present branch runs, and once; None if that is not known.
        taken: whether an earlier branch of an `if` ran.
        condition: statements of the condition that is being read.
    """

    opening: str
    runs: bool | None = None
    taken: bool | None = False
    condition: list[list[_Token]] | None = None


class _Interpreter:
    """Follows the assignments of a script, and expands the words of its commands."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.variables: dict[str, list[list[_Piece]]] = {}
        self.exported: set[str] = set()
        self.expanded = 0  # characters
        self.open: list[_Block] = []  # around the statement

    def commands(self, statements: Iterator[list[_Token]]) -> Iterator[Command]:
        """Yields the commands with a name."""
        for tokens in statements:
            if tokens[0].operator == "(":
                self._add_condition(tokens)
                self.open.append(_Block("("))
            elif tokens[0].operator == ")":
                if self.open and self.open[-1].opening == "(":  # else it ends a pattern of `case`
                    self.open.pop()
            elif command := self._read_statement(tokens):
                yield command

    @property
    def _is_certain(self) -> bool:
        """True if the statement runs, and once."""
        return all(block.runs for block in self.open)

    def _read_statement(self, tokens: list[_Token]) -> Command | None:
        first = tokens[0]
        while tokens and (word := tokens[0].plain) in (*_OPENING, *_CLOSED, *_KEYWORDS):
            if word == "!" and self._is_in_condition():
                break
            tokens = tokens[1:]
            if word in _OPENING:
                self.open.append(_Block(word, condition=[] if word == "if" else None))
            elif word in _CLOSED and self.open:
                self.open.pop()
            elif word in ("then", "else", "elif"):
                self._enter_branch(word)
            if word in ("for", "select") and tokens and self._is_reached():
                self.variables[tokens[0].plain] = [[self._unknown(f"${tokens[0].plain}", tokens[0].line)]]
            if word in ("for", "select", "case"):
                return None
        if tokens:
            tokens[0].follows, tokens[0].redirected = first.follows, first.redirected
            self._add_condition(tokens)
            tokens = tokens[1:] if tokens[0].plain == "!" else tokens
        if not tokens or not self._is_reached():
            return None
        declares = bool(tokens) and tokens[0].plain in _DECLARATIONS
        if declares:
            exports = tokens[0].plain == "export"
            names = [token for token in tokens[1:] if not token.plain.startswith("-")]
            for token in names:
                name = self._assign(token) or token.plain
                if exports:
                    self.exported.add(name)
            return None
        own: dict[str, Word] = {}
        leading = 0
        while leading < len(tokens) and _ASSIGNMENT.match(_start(tokens[leading])):
            leading += 1
        if leading == len(tokens):
            for token in tokens:
                self._assign(token)
            return None
        for token in tokens[:leading]:
            name, fields = self._evaluate(token)
            if fields:
                own[name] = _join(fields[0])
        words = tuple(word for token in tokens[leading:] for word in self._expand(token))
        shared = {name: _join(self.variables[name][0]) for name in sorted(self.exported) if self._is_text(name)}
        return Command(words, shared | own) if words else None

    def _is_reached(self) -> bool:
        """Returns False if a branch around the statement is known not to run."""
        return all(block.runs is not False for block in self.open)

    def _is_in_condition(self) -> bool:
        return bool(self.open) and self.open[-1].condition is not None

    def _add_condition(self, tokens: list[_Token]) -> None:
        """Adds a statement to the condition that is being read, if there is one."""
        if self._is_in_condition() and (condition := self.open[-1].condition) is not None:
            condition.append(tokens)

    def _enter_branch(self, word: str) -> None:
        """Decides whether the statements behind `then`, `else` or `elif` run."""
        if not self.open or self.open[-1].opening != "if":
            return
        block = self.open[-1]
        if word == "elif":
            block.condition, block.runs = [], None
            return
        holds: bool | None = True
        if word == "then":
            holds, block.condition = self._evaluate_condition(block.condition or []), None
        block.runs = False if block.taken or holds is False else None if None in (block.taken, holds) else True
        block.taken = True if block.taken or holds else None if None in (block.taken, holds) else False

    def _evaluate_condition(self, statements: list[list[_Token]]) -> bool | None:
        """Returns whether a condition holds; None if that is not known without running the script."""
        # A later round of a loop, or a later call of a function, has other values.
        if any(block.opening in _REPEATED for block in self.open):
            return None
        joins = {tokens[0].follows for tokens in statements[1:]}
        if not statements or len(joins) > 1 or not joins <= {"&&", "||"}:
            return None
        # `[[ a && b ]]` is split at its operator.
        closing = _TESTS.get(statements[0][0].plain, "")
        values = [self._evaluate_test(tokens, within=closing) for tokens in statements]
        decisive = "||" in joins
        if decisive in values:
            return decisive
        return None if None in values else not decisive

    def _evaluate_test(self, tokens: list[_Token], within: str = "") -> bool | None:
        """Returns whether a test like `[ "$A" = b ]` holds; None if that is not known, or it is another command.

        Args:
            within: the word that closes the test; parts between its operators have no opening word of their own.
        """
        if tokens[0].operator or tokens[0].redirected:
            return None
        if tokens[0].plain == "!":
            holds = self._evaluate_test(tokens[1:], within) if len(tokens) > 1 else None
            return None if holds is None else not holds
        if (opening := tokens[0].plain) in _TESTS:
            tokens, within = tokens[1:], _TESTS[opening]
        elif within != "]]":
            return None
        if within and tokens and tokens[-1].plain == within:
            tokens = tokens[:-1]
        expanded = [self._expand(token) for token in tokens]
        if any(word.is_computed for words in expanded for word in words):
            return None
        if within == "]]":  # where each token is one word
            if any(len(words) > 1 for words in expanded):
                return None
            expanded = [words or [Word("", tokens[0].line)] for words in expanded]
        words = [word.text for each in expanded for word in each]
        if words[:1] == ["!"] and len(words) > 1:
            holds = _compare(words[1:])
            return None if holds is None else not holds
        # The right side of `[[ a == b ]]` is a pattern if it is not quoted.
        is_pattern = (
            any(not part.quoted and set("*?[") & set(part.text) for part in tokens[-1].parts) if tokens else False
        )
        return None if is_pattern else _compare(words)

    def _is_text(self, name: str) -> bool:
        return len(self.variables.get(name, ())) == 1

    def _assign(self, token: _Token) -> str | None:
        """Sets the variable of an assignment and returns its name; None if the token is none."""
        match = _ASSIGNMENT.match(_start(token))
        if match is None:
            return None
        appends = bool(match[2])
        if token.items and token.items[0].parts and _is_expansion(token.items[0].parts, match[1]):
            token, appends = _Token(token.parts, token.items[1:]), True  # NAME=("${NAME[@]}" more)
        name, fields = self._evaluate(token)
        if not self._is_certain:
            fields = [[piece._replace(computed=True) for piece in pieces] for pieces in fields]
        if appends:
            before = self.variables.get(name, [])
            joins = token.items is None and bool(before)
            fields = [*before[:-1], [*before[-1], *fields[0]]] if joins else [*before, *fields]
        elif not self._is_certain:
            fields = [[self._unknown(f"${name}", token.line)]]
        self.variables[name] = fields
        return name

    def _evaluate(self, token: _Token) -> tuple[str, list[list[_Piece]]]:
        """Returns the name and the value of an assignment: one list of pieces, or one for each item of an array."""
        match = _ASSIGNMENT.match(_start(token))
        assert match is not None
        if token.items is not None:
            words = [word for item in token.items for word in self._expand(item)]
            return match[1], [[_Piece(word.text, word.line, computed=word.is_computed)] for word in words]
        first = token.parts[0]
        parts = [first._replace(text=first.text[match.end() :]), *token.parts[1:]]
        return match[1], [[piece for part in parts for piece in self._substitute(part)]]

    def _expand(self, token: _Token) -> list[Word]:
        """Returns the words that a token expands to."""
        if token.items is not None:
            return [Word(Computed(_start(token) + "(...)"), token.line)]
        words: list[Word] = []
        current: list[_Piece] | None = None
        for piece in (piece for part in token.parts for piece in self._substitute(part)):
            for text in re.split(r"(\s+)", piece.text) if piece.splits else [piece.text]:
                if piece.splits and not text.strip():
                    if text and current:
                        words.append(_join(current))
                    current = None if text else current
                else:
                    current = current or []
                    current.append(piece._replace(text=text))
        return [*words, _join(current)] if current else words

    def _substitute(self, part: _Part, depth: int = 0) -> list[_Piece]:
        """Returns the pieces that a part of a word expands to."""
        if not part.expands:
            return [_Piece(part.text, part.line)]
        match = _VARIABLE.fullmatch(part.text)
        default = _DEFAULT.fullmatch(part.text)
        name = (match or default or ["", ""])[1]
        if name in self.variables:
            fields = self.variables[name]
            # A few lines of $A$A can grow to billions of characters.
            self.expanded += sum(1 + len(piece.text) for pieces in fields for piece in pieces)
            if self.expanded > LARGEST_FILE:
                raise RecipeError(f"{self.where}:{part.line}: {name}: expands to more than a megabyte")
            array = bool(match and match[2])
            pieces = [[piece._replace(splits=not part.quoted) for piece in pieces] for pieces in fields]
            if array:  # an unknown array is several words
                pieces = [[self._unknown(part.text, part.line)] if _is_unknown(p, name) else p for p in pieces]
            if not array:
                return pieces[0] if pieces else []
            return [piece for pieces_of_item in pieces for piece in (*pieces_of_item, _BREAK)][:-1]
        if default and depth < _DEEPEST:
            tokens = _Scanner(f'"{default[2]}"' if '"' not in default[2] else default[2], self.where, part.line)
            parts = [inner for statement in tokens.statements() for token in statement for inner in token.parts]
            return [piece for inner in parts for piece in self._substitute(inner, depth + 1)]
        if (number := self._calculate(part.text)) is not None:
            return [_Piece(str(number), part.line)]
        return [self._unknown(part.text, part.line)]

    def _calculate(self, source: str) -> int | None:
        """Returns the value of `$((8 * 4))` or `$(expr 8 / 2)`; None if it is neither, or not of whole numbers."""
        match = re.fullmatch(r"\$\(\((.*)\)\)|[$`]\(?\s*expr\s(.*?)[)`]", source, re.DOTALL)
        if match is None:
            return None
        names = r"\$\{?([A-Za-z_]\w*)\}?|\b([A-Za-z_]\w*)\b"
        text = re.sub(names, lambda name: self._look_up_number(name[1] or name[2]), match[1] or match[2])
        text = re.sub(r"\\(?=\*)|['\"]", "", text).strip()
        if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", text):
            return None
        try:
            return _evaluate_arithmetic(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError):
            return None

    def _look_up_number(self, name: str) -> str:
        return _join(self.variables[name][0]).text if self._is_text(name) else name

    def _unknown(self, source: str, line: int) -> _Piece:
        return _Piece(source, line, computed=True)


def _compare(words: list[str]) -> bool | None:
    """Returns the value of `a = b`, `-z a` or the like; None if it is another test."""
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, name, right] if name in _COMPARISONS and re.fullmatch(r"\d{1,18} \d{1,18}", f"{left} {right}"):
            return _COMPARISONS[name](int(left), int(right))
    return None


_DEEPEST = 16
"""Defaults within defaults."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # of numbers above 0
    ast.Mod: operator.mod,
}


def _evaluate_arithmetic(node: ast.expr) -> int:
    """Raises ValueError if the expression is not of whole numbers from 0 to 2**53."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _evaluate_arithmetic(node.left), _evaluate_arithmetic(node.right)
        if right == 0 and isinstance(node.op, ast.Div | ast.Mod):
            raise ValueError
        value = _ARITHMETIC[type(node.op)](left, right)
    else:
        raise ValueError
    if not 0 <= value <= 2**53:
        raise ValueError
    return value


def _is_unknown(pieces: list[_Piece], name: str) -> bool:
    """Returns True if the pieces are the unknown value of a variable."""
    return len(pieces) == 1 and pieces[0].computed and pieces[0].text == f"${name}"


def _is_expansion(parts: list[_Part], name: str) -> bool:
    """Returns True if a word is all items of an array."""
    sources = [part.text for part in parts if part.text]
    return sources in ([f"${{{name}[@]}}"], [f"${{{name}[*]}}"])


def _start(token: _Token) -> str:
    """Returns the text that a token begins with before any quote."""
    first = token.parts[0]
    return "" if first.quoted or first.expands else first.text


def _join(pieces: list[_Piece]) -> Word:
    text = "".join(piece.text for piece in pieces)
    line = next((piece.line for piece in pieces if piece.text), pieces[0].line)
    return Word(Computed(text) if any(piece.computed for piece in pieces) else text, line)


def list_commands(text: str, where: str) -> list[Command]:
    """Returns the commands of a script in their order, with their words after expansion.

    Args:
        where: name of the script in errors.

    Raises:
        RecipeError: a quote or bracket is not closed.

    Example:
        >>> [command] = list_commands('n=8\\nCARDS=$n run --size $((n * 2)) "$1" \\\\\\n  --b', "f.sh")
        >>> [word.text for word in command.words], command.environment["CARDS"].text, command.words[-1].line
        (['run', '--size', '16', '$1', '--b'], '8', 3)
    """
    return list(_Interpreter(where).commands(_Scanner(text.replace("\r\n", "\n"), where).statements()))
