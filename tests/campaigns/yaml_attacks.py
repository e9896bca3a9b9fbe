"""What YAML and patterns can do to a program that reads them."""

PATTERNS = [
    "(.+)+(.+)+(.+)+!",
    "(a*)*(a*)*(a*)*!",
    "(a|a)*!",
    "(?:a?){40}a{40}!",
    "a{9999999999}",
    "((a{1,100}){1,100}){1,100}",
    "(" * 480 + ")" * 480,
    "(?P<a>x)(?P<a>y)",
    r"(a)\1",
    "(?=a)",
    "(?i)A+",
    r"\pN\C",
    "[[:alpha:]]",
    "*a" * 400,
    "[!a-" * 100,
]
VALUES = [  # as they stand in a file
    *(f"'{pattern}'" for pattern in PATTERNS),
    "0x" + "f" * 4_500,
    "0" + "7" * 6_000,
    "0b" + "1" * 20_000,
    "9" * 4_400,
    ":".join(["1"] + ["59"] * 3_000),
    "190:20:30",
    "1_0_0",
    ".inf",
    ".nan",
    "-.inf",
    "1e400",
    "2001-12-14",
    "2001-99-99",
    "0001-01-01T00:00:00+99:99",
    "!!python/object/apply:os.getcwd []",
    "!!python/name:os.system",
    "!!binary aGk=",
    "!!binary '%'",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!pairs [a]",
    "!!int ''",
    "!!int '-'",
    "!!float 'x'",
    "!!bool ''",
    "!!null 1",
    "!!timestamp x",
    "!own {}",
    "=",
    "&a [*a]",
    "&a {<<: *a}",
    "{<<: {a: 1}, <<: [{a: 2}, {b: 3}]}",
    "{<<: 1}",
    "{a: 1, a: 2}",
    "{[a]: 1, {b: 1}: 2}",
    "{a: 1, ? a : 2}",
    "{1: 2, true: 3, null: 4, 1.0: 5}",
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\x00"',
    '"\\U00110000"',
    '"\\e[31m\\r"',
    '"\\N\\_\\L\\P"',
    "'\u202e\u2028'",
    "|\n  a",
    ">+9\n a",
    "[" + "1, " * 3_000 + "1]",
    "[" * 30 + "]" * 30,
    "{a: " * 30 + "1" + "}" * 30,
    "*a",
    "&a 9",
    "7",
    "999999",
    "[99999, 99999]",
    "[3, 5]",
    "{min: 3}",
    "auto",
    "true",
    "~",
    "",
]
INSERTIONS = [
    "&a ",
    "*a",
    "<<: *a",
    "<<: [*a, *a, *a, *a, *a, *a, *a, *a, *a]",
    "? ",
    "--- ",
    "...",
    "%YAML 1.1\n",
    "%YAML 9.9\n",
    "%TAG ! !!\n",
    "- " * 300,
    "[" * 3_000,
    "{a: " * 300,
    "!" * 50,
    "\t",
    "\x85",
    "\0",
    "\ufeff",
    "\ufffe",
    "\u2028",
    "#",
    "'",
    '"',
    ": ",
    ", ",
    "|\n",
    ">-\n  ",
    "9" * 60,
    "a" * 400,
    *VALUES,
]
ENCODINGS = [*["utf-8"] * 10, "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "utf-7"]


# A rule file with nothing wrong: the value of each key.
WHOLE = {
    "description": "x",
    "name": "x",
    "path": "'*'",
    "stage_pattern": "'a|1'",
    "dilated_kernel_size": "9",
    "interpolation": "bilinear",
}
ATTACKS = {  # values of one key
    "description": ["x # " + "a" * 120_000],
    "path": ["&a [" + "b, " * 1_000 + "'*'] }\n" + "- match: {path: *a }\n" * 12 + "- match: {path: x"],
    "stage_pattern": [*(f"'{pattern}'" for pattern in PATTERNS), "'(" + "a" * 998 + "'", '"(\\e[31m"'],
    "dilated_kernel_size": ["999999", "[99999, 99999]", "[2, 2]"],
    "interpolation": [
        'bilinear\n  "\\e[31m": 1',
        "bilinear\n  ? " + "a" * 2_000 + "\n  : 1",
        'bilinear\n- name: "\\e[31m' + "a" * 1_100 + '"',
    ],
}


def whole(chance):
    """A rule file with an attack in one place."""
    key = chance.choice(list(WHOLE))
    return _whole(key, chance.choice(chance.choice([VALUES, ATTACKS.get(key, VALUES)])))


def _whole(key, attack):
    values = WHOLE | {key: attack}
    others = "".join(f"  {name}: {value}\n" for name, value in values.items() if name not in ("description", "path"))
    return f"format: 1\ndescription: {values['description']}\nrules:\n- match: {{path: {values['path']} }}\n{others}"


def _file(value):
    return lambda: b"format: 1\nrules:\n- dilated_kernel_size: " + value() + b"\n"


def _levels(start, level, count=12, width=9):
    """Anchored values, each of them several times the one before."""
    names = [f"&a{number} {level(f'*a{number - 1}', width)}" for number in range(1, count)]
    return "\n".join(f"- {text}" for text in [f"&a0 {start}", *names])


def _aliases():
    return _levels("[x]", lambda alias, width: "[" + ", ".join([alias] * width) + "]").encode()


def _merges():
    levels = _levels("{k: v}", lambda alias, width: "{<<: [" + ", ".join([alias] * width) + "]}", 8)
    return f"format: 1\nrules:\n{levels}\n".encode()


COSTLY = [  # to make, to write, or to read where a bound is missing
    lambda: _whole("path", "[" + "b, " * 11_000 + "'*']").encode(),
    _aliases,
    _merges,
    lambda: b"[" * 100_000,
    lambda: b"- " * 100_000,
    lambda: b"{a: " * 90_000,
    lambda: b"? " * 90_000,
    _file(lambda: b"[" * 20_000 + b"]" * 20_000),
    _file(lambda: b"[" + b"1, " * 30_000 + b"1]"),
    _file(lambda: b"[" + b"1, " * 3_500_000 + b"1]"),
    _file(lambda: b"'" + b"a" * 99_000 + b"'"),
    _file(lambda: b"0x" + b"f" * 99_000),
    lambda: b"a" * 50_000_000,
    lambda: b"# " + b"a" * 50_000_000,
    lambda: b"format: 1\n" + b"\n" * 50_000_000,
    lambda: b"\0" * 50_000_000,
]
