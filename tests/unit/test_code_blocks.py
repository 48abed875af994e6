"""Which program a response holds, in blocks as models write them."""

from __future__ import annotations

import pytest

from roll_like.builtin.rewards.code import with_setup
from roll_like.builtin.rewards.code_block import CodeBlock, code_blocks, last_program

DOCSTRING = 'def f():\n    """Adds.\n\n    ```\n    f(1)\n    ```\n    """\n    return 1\n'
EXAMPLES = '"""Adds.\n\n```python\nf(1)\n```\nand\n```\nf(2)\n```\n"""\nx = 1\n'
LOOP = "for x in y:\n    print(x)\n"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        # in lists and quotations, indented
        ("1. So:\n   ```python\n   for x in y:\n       print(x)\n   ```\n2. Done", LOOP),
        ("- So:\n\n    ```python\n    for x in y:\n        print(x)\n    ```", LOOP),
        ("- ```python\n  for x in y:\n      print(x)\n  ```", LOOP),
        ("\t```python\n\tfor x in y:\n\t    print(x)\n\t```", LOOP),
        ("    ```python\nfor x in y:\n    print(x)\n    ```", LOOP),
        ("```python\n    for x in y:\n        print(x)\n```", LOOP),
        ("> ```python\n> for x in y:\n>     print(x)\n> ```\nDone", LOOP),
        ("  ```python\n  s = '''\nraw\n  '''\n  ```", "s = '''\nraw\n'''\n"),
        ("   ```python\n   x = 1\n\n   y = 2\n   ```", "x = 1\n\ny = 2\n"),
        # fences behind text and code, with other ends of lines
        ("Here: ```python\nx = 1\n```", "x = 1\n"),
        ("Here it is:```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\ny = 2```", "x = 1\ny = 2\n"),
        ("```python\nx = 1```\nThat was it.", "x = 1\n"),
        ("```python\nx = 1\n``` That was it.\nAnd:\n```text\n1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2\n"),
        ("\ufeff```python\n\ufeffx = 1\n```", "x = 1\n"),
        ("~~~ python\nx = '```'\n~~~~", "x = '```'\n"),
        ("`````py\n````\n`````", "````\n"),
        ("``` \nx = 1\n```  ", "x = 1\n"),
        # fences within programs
        (f"```python\n{DOCSTRING}```\nDone", DOCSTRING),
        (f"```python\n{EXAMPLES}```\nDone", EXAMPLES),
        ("```python\n# ```\n# f(1)\n# ```\nx = 1\n```", "# ```\n# f(1)\n# ```\nx = 1\n"),
        ("```python\ns = '''```\n```'''\n```", "s = '''```\n```'''\n"),
        ("```python\nx = 1  # don't '''\n```\nand '''\n```", "x = 1  # don't '''\n"),
        ("```python\nx = \"it's '''\"\n```", "x = \"it's '''\"\n"),
        # several blocks
        ("```python\nx = '''a\n```\nFixed:\n```python\nx = '''a'''\n```", "x = '''a'''\n"),
        ("```python\nx = 1\nnot closed:\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```output\n1\n```", "x = 1\n"),
        ("```markdown\n# Title\n```python\nx = 1\n```\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```python\nx = 1\n```\n```pycon\n>>> x\n1\n```", "x = 1\n"),
        ("use ``` for code\n```python\nx = 1\n```", "x = 1\n"),
        # ends of lines that are none
        ("```python\ns = 'a\u2028b\u2029c\x85d\x1ce\x0bf\x0cg'\n```", "s = 'a\u2028b\u2029c\x85d\x1ce\x0bf\x0cg'\n"),
    ],
)
def test_the_source(text: str, source: str) -> None:
    assert last_program(text, "python") == CodeBlock(source, "python")


@pytest.mark.parametrize(
    ("tag", "language"),
    [
        *(
            (tag, "python")
            for tag in ("python3.10", "Python", "PY", "py3.11", "pypy3", "ipython3", "python-3", "python 3")
        ),
        *(
            (tag, "python")
            for tag in ('python title="x.py"', "{.python}", "{.python .numberLines}", "{python}", "python:a.py")
        ),
        *(
            (tag, "python")
            for tag in ("python=", "python,linenos", "python {1,3}", "main.py", "src/main.py", "python3")
        ),
        *((tag, "cpp") for tag in ("C++", "c++17", "cpp20", "gnu++17", "cxx", "cc", "a.cpp", "g++")),
        *((tag, "javascript") for tag in ("JavaScript", "js", "node.js", "mjs", "es6", "index.js")),
        *(
            (tag, tag)
            for tag in ("pycon", "pytb", "text", "c", "java", "json", "cs", "pyramid", "jsonc", "python-repl")
        ),
    ],
)
def test_tags(tag: str, language: str) -> None:
    assert code_blocks(f"```{tag}\nx\n```") == [CodeBlock("x\n", language)]


def test_much_text_is_read_in_time_that_grows_with_it() -> None:
    for text in ("```python\n'''\n", "```\n```\n", "'''\"\"\"\n", "x ```\n", "> ```py\n> x", "- " * 9 + "```\n"):
        code_blocks(text * 2000)
    code_blocks(">" * 50_000 + "```\n" + "x\n" * 2000)


FUTURE = "from __future__ import annotations"


@pytest.mark.parametrize(
    ("setup", "program", "expected"),
    [
        ("", "x = 1\n", "x = 1\n"),
        ("import math\n\n", "x = 1\n", "import math\n\nx = 1\n"),
        ("import math", f"{FUTURE}\nx = 1\n", f"{FUTURE}\nimport math\n\npass\nx = 1\n"),
        ("import math", f'"""A."""\n# b\n{FUTURE}; x = 1\n', f'{FUTURE}\nimport math\n\n"""A."""\n# b\npass; x = 1\n'),
        (
            "import math",
            "from __future__ import (\n    division,\n    annotations as a,\n)\nx = 1\n",
            "from __future__ import division, annotations\nimport math\n\npass\n\n\n\nx = 1\n",
        ),
        (
            f"'''A.'''\n{FUTURE}\nimport math",
            f"{FUTURE}\nx = 1\n",
            f"{FUTURE}\n'''A.'''\npass\nimport math\n\npass\nx = 1\n",
        ),
        ("import math", f"import sys\n{FUTURE}\n", f"import math\n\nimport sys\n{FUTURE}\n"),
        ("import math", f"x = '''\n{FUTURE}\n'''\n", f"import math\n\nx = '''\n{FUTURE}\n'''\n"),
        (
            "import math",
            f"'''\\d é\n{FUTURE}\n'''\n{FUTURE}\n",
            f"{FUTURE}\nimport math\n\n'''\\d é\n{FUTURE}\n'''\npass\n",
        ),
        ("import math", f"{FUTURE}\nx = (", f"{FUTURE}\nimport math\n\npass\nx = ("),
        ("import math", f"{'(' * 999}\n{FUTURE}\n", f"import math\n\n{'(' * 999}\n{FUTURE}\n"),
    ],
)
def test_setup_comes_behind_imports_from_the_future(setup: str, program: str, expected: str) -> None:
    assert with_setup(setup, program) == expected
