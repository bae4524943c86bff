"""The flags that launch scripts pass to training programs, read from the text of .sh and .yaml files; nothing is run."""

import re
from collections import Counter
from dataclasses import dataclass

import yaml

# a program whose name has one of these trains; others are tools with flags of their own
_TRAINS = re.compile(r"pretrain|finetune|train|sft|run_", re.IGNORECASE)
_TOOLS = re.compile(
    r"preprocess|convert|checkpoint|eval|generat|server|merge|download|tokeniz|constrain", re.IGNORECASE
)
_ASSIGNED = re.compile(
    r"(?:^|[;&|]|\b(?:then|else|do)\b)[ \t]*"
    r"(?:export[ \t]+|local[ \t]+|readonly[ \t]+|declare[ \t]+(?:-\w+[ \t]+)?)?([A-Za-z_]\w*)(\+?)=[ \t]*"
    r"(\"(?:\\.|[^\"\\])*\"|'[^']*'|\((?:[^()]|\([^()]*\))*\)|[^\s;#]*)",
    re.MULTILINE,
)
_HERE = re.compile(r"read\s+-r\s+-d\s+''\s+(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\s*\2\b", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")
_DEPTH = 12  # variables in variables


@dataclass(frozen=True)
class FlagUse:
    """One flag as a launch script passes it. value: its words where they are written out, else None."""

    flag: str
    value: tuple[str, ...] | None
    program: str
    where: str


def flags_of_shell(text: str, source: str) -> tuple[list[FlagUse], Counter[str]]:
    """Return the flags that a script passes to programs that train, and how often it starts other programs.

    Of a variable that is set in several places every value counts, so that all branches of an `if` are read.
    """
    text = _without_comments(text.replace("\\\r\n", " ").replace("\\\n", " "))
    values: dict[str, list[str]] = {}
    for name, _, body in _HERE.findall(text):
        values.setdefault(name, []).append(body)
    text = _HERE.sub(" ", text)
    for name, _, value in _ASSIGNED.findall(text):
        values.setdefault(name, []).append(value.strip("\"'()") if value[:1] in "\"'(" else value)
    lines = _ASSIGNED.sub(" ", text).splitlines()
    lines += [value.replace("\n", " ") for held in values.values() for value in held if re.search(r"\.py\b", value)]
    uses: dict[tuple[str, str, tuple[str, ...] | None], FlagUse] = {}
    others: Counter[str] = Counter()
    for line in lines:
        if not re.search(r"\.py\b", _expand(line, values)):
            continue
        words = [word.strip("\"'`;") for word in _expand(line, values).split()]
        programs = [index for index, word in enumerate(words) if re.fullmatch(r"[^-=\s]\S*\.py", word)]
        if not programs:
            continue
        program = words[programs[0]].rpartition("/")[2]
        if not trains(program):
            others[program] += 1
            continue
        for use in _uses(words[programs[0] + 1 :], program, source):
            uses.setdefault((use.program, use.flag, use.value), use)
    return list(uses.values()), others


def trains(program: str) -> bool:
    """Return whether a program of this file name trains, as its name tells."""
    return bool(_TRAINS.search(program)) and not _TOOLS.search(program)


def _uses(words: list[str], program: str, source: str) -> list[FlagUse]:
    found = []
    for index, word in enumerate(words):
        if word in ("|", "||", "&&", "&", ">", ">>", "2>&1", "&>", "2>"):
            break
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", word)
        if not match:
            continue
        value = [match[2]] if match[2] is not None else []
        for following in words[index + 1 :] if match[2] is None else []:
            if following.startswith("--") or following in ("|", "||", "&&", "&", ">", ">>", "2>&1", "&>", "2>"):
                break
            value.append(following)
        is_literal = not any(re.search(r"[$<>`{}\\]", item) for item in value)
        found.append(FlagUse(match[1], tuple(value) if is_literal else None, program, source))
    return found


def _without_comments(text: str) -> str:
    lines = [re.sub(r"(^|\s)#.*", r"\1", line) if "#" in line else line for line in text.splitlines()]
    return "\n".join(lines)


def _expand(text: str, values: dict[str, list[str]]) -> str:
    """Return a text with the values of its variables; one that the script does not set stays."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in values:
            held = [
                value for value in dict.fromkeys(values[name]) if f"${name}" not in value and f"${{{name}" not in value
            ]
            added = [
                re.sub(rf"\$\{{?{name}\b\}}?", " ", value) for value in dict.fromkeys(values[name]) if value not in held
            ]
            plain = [value for value in held if "--" not in value]
            # of a plain value the first; of lists of flags all
            return " ".join([*[value for value in held + added if "--" in value], *plain[:1]]) if held + added else " "
        if match[2]:
            return match[2]
        return match[0] if name else ""

    for _ in range(_DEPTH):
        before = text
        text = _VARIABLE.sub(value_of, text).replace("\n", " ")
        if text == before or len(text) > 1 << 17:
            break
    return text


def flags_of_yaml(text: str, source: str) -> tuple[list[FlagUse], Counter[str]]:
    """Return the flags of a configuration whose keys are flags (`--num-layers: 4`), at any depth."""
    try:
        roots = list(yaml.safe_load_all(text)) if "--" in text else []
    except yaml.YAMLError:
        return [], Counter()
    found: list[FlagUse] = []
    while roots:
        node = roots.pop()
        if isinstance(node, list):
            roots += node
        elif isinstance(node, dict):
            for key, value in node.items():
                if isinstance(key, str) and re.fullmatch(r"--[A-Za-z][\w-]*", key):
                    words = [] if value is True or value is None else str(value).split()
                    is_literal = not any(re.search(r"[$<>{}]", word) for word in words)
                    found.append(FlagUse(key, tuple(words) if is_literal else None, source, source))
                else:
                    roots.append(value)
    return found, Counter()
